"""The relay task: two or more hops over invented names, one hop in each agent's hands.

    Alice: "Orvane was founded by Tilda Marsk." …      Bob: "Tilda Marsk was born in Quelby." …
    Question: In which town was the founder of Orvane born?          Gold: Quelby

Nothing can be known beforehand and nobody can answer alone, so what is measured is the exchange.
Tasks are endless, each derived from (seed, split, index) alone; train and test share no name.

    optima-lite tasks relay --limit 32
    optima-lite tasks relay --split test --set distractors=6 --set family=river
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from optima_lite.errors import SettingError
from optima_lite.records import Task


@dataclass(frozen=True)
class Hop:
    """One relation: how a fact is stated, and which kinds of name it joins."""

    fact: str  # over {a} and {b}
    to: str  # kind of {b}


@dataclass(frozen=True)
class Family:
    """A chain of relations that starts at `kind`, and one question for each number of hops."""

    kind: str
    hops: tuple[Hop, ...]
    questions: Mapping[int, str]  # hops -> question over {x}


_BORN = Hop("{a} was born in {b}.", "town")
FAMILIES: dict[str, Family] = {
    "company": Family(
        "company",
        (
            Hop("{a} was founded by {b}.", "person"),
            _BORN,
            Hop("{a} lies in the district of {b}.", "district"),
        ),
        {
            2: "In which town was the founder of {x} born?",
            3: "In which district lies the town where the founder of {x} was born?",
        },
    ),
    "book": Family(
        "book",
        (
            Hop("The book {a} was written by {b}.", "person"),
            Hop("{a} lives in {b}.", "town"),
            Hop("{a} lies in the district of {b}.", "district"),
        ),
        {
            2: "In which town does the author of the book {x} live?",
            3: "In which district lies the town where the author of the book {x} lives?",
        },
    ),
    "ship": Family(
        "ship",
        (
            Hop("The ship {a} is sailed by captain {b}.", "person"),
            Hop("{a} comes from {b}.", "town"),
            Hop("{a} lies in the district of {b}.", "district"),
        ),
        {
            2: "From which town does the captain of the ship {x} come?",
            3: "In which district lies the town from which the captain of the ship {x} comes?",
        },
    ),
    "painting": Family(
        "book",
        (
            Hop("The painting {a} was made by {b}.", "person"),
            Hop("{a} was taught by {b}.", "person"),
            _BORN,
        ),
        {
            2: "Who taught the painter of {x}?",
            3: "In which town was the teacher of the painter of {x} born?",
        },
    ),
    "river": Family(
        "river",
        (
            Hop("The river {a} flows into lake {b}.", "lake"),
            Hop("Lake {a} lies in the district of {b}.", "district"),
            Hop("The district of {a} is governed by {b}.", "person"),
        ),
        {
            2: "In which district lies the lake that the river {x} flows into?",
            3: "Who governs the district of the lake that the river {x} flows into?",
        },
    ),
    "team": Family(
        "company",
        (
            Hop("The team {a} is coached by {b}.", "person"),
            Hop("{a} works with the assistant {b}.", "person"),
            Hop("{a} lives in {b}.", "town"),
        ),
        {
            2: "Who is the assistant of the coach of the team {x}?",
            3: "In which town lives the assistant of the coach of the team {x}?",
        },
    ),
}

_ONSETS = "b br d dr f g gl h j k kr l m n p pr r s st t tr v w z".split()
_VOWELS = "a e i o u ai ea".split()
_CODAS = "l m n r s t x nd rk lt".split()
_ENDINGS = {
    "company": ("ex", "ora", "ium", "ica", "on"),
    "book": ("a", "une", "el", "is", "ara"),
    "ship": ("ina", "us", "essa", "or", "ia"),
    "town": ("ton", "by", "ford", "wick", "ham", "burg"),
    "district": ("shire", "mark", "land", "vale", "moor"),
    "river": ("e", "a", "en", "ow", "er"),
    "lake": ("mere", "is", "o", "an", "ell"),
}


class Relay:
    """The built-in dataset; see the module's docstring."""

    name = "relay"
    splits = ("train", "test")
    settings: Mapping[str, str] = {
        "family": f"one of {', '.join(FAMILIES)} (default: a random one per task)",
        "hops": "2 or 3 relations to follow (default 2)",
        "distractors": "facts per hop that do not matter (default 3)",
    }

    def tasks(
        self,
        *,
        split: str,
        source: str | None = None,
        agents: int = 2,
        seed: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Task]:
        """Endless tasks; hop h is told to agent h mod `agents`. Raises SettingError."""
        settings = settings or {}
        if split not in self.splits:
            raise SettingError(f"split is one of {', '.join(self.splits)}, not {split!r}")
        if source is not None:
            raise SettingError("relay makes its own tasks: --source does not apply")
        family = settings.get("family")
        if family is not None and family not in FAMILIES:
            raise SettingError(f"family is one of {', '.join(FAMILIES)}, not {family!r}")
        hops = _number(settings, "hops", 2, 2, 3)
        distractors = _number(settings, "distractors", 3, 0, 20)
        if agents > hops:
            raise SettingError(f"{hops} hops can be split for at most {hops} agents, not {agents}")
        for index in count():
            yield _task(split, seed, index, family, hops, distractors, agents)


def _number(settings: Mapping[str, str], key: str, default: int, low: int, high: int) -> int:
    text = settings.get(key, str(default))
    if not text.isdecimal() or not low <= int(text) <= high:
        raise SettingError(f"{key} is a whole number from {low} to {high}, not {text!r}")
    return int(text)


def _task(
    split: str, seed: int, index: int, name: str | None, hops: int, distractors: int, agents: int
) -> Task:
    rng = random.Random(f"relay/{split}/{seed}/{index}")
    name = name or _family(split, seed, index)
    family = FAMILIES[name]
    fresh = _namer(rng, split)
    # Row 0 is the chain that the question asks for, the others lead somewhere else.
    chains = []
    for _ in range(distractors + 1):
        chain = [fresh(family.kind)]
        for hop in family.hops[:hops]:
            chain.append(fresh(hop.to))
        chains.append(chain)
    contexts: list[list[str]] = [[] for _ in range(agents)]
    for h, hop in enumerate(family.hops[:hops]):
        facts = [hop.fact.format(a=chain[h], b=chain[h + 1]) for chain in chains]
        rng.shuffle(facts)
        contexts[h % agents] += facts
    shape = f"{name}{hops}x{distractors}" + (f"a{agents}" if agents != 2 else "")
    return Task(
        id=f"relay/{split}/{shape}-{seed}-{index}",
        setting="exchange",
        question=family.questions[hops].format(x=chains[0][0]),
        answers=(chains[0][-1],),
        metric="exact",
        contexts=tuple(tuple(context) for context in contexts),
        team="relay",
        meta={"family": name, "hops": hops, "chain": chains[0], "others": chains[1:]},
    )


def _family(split: str, seed: int, index: int) -> str:
    """The family of a task: each once in every six, in an order of its own, so that a round of
    a dozen tasks has as much of one as of another."""
    block, place = divmod(index, len(FAMILIES))
    order = list(FAMILIES)
    random.Random(f"relay/{split}/{seed}/families/{block}").shuffle(order)
    return order[place]


def _namer(rng: random.Random, split: str) -> Callable[[str], str]:
    """A function from a kind to a name that is new within the task and belongs to the split."""
    used: set[str] = set()

    def fresh(kind: str) -> str:
        while True:
            if kind == "person":
                parts = [_word(rng, ("a", "o", "en", "ia", "us", "il"), split)]
                parts.append(_word(rng, ("er", "man", "ow", "ell", "ing", "eck"), split))
            else:
                parts = [_word(rng, _ENDINGS[kind], split)]
            # Each part is new: nobody in a task shares a first name or a surname.
            if used.isdisjoint(parts):
                used.update(parts)
                return " ".join(parts)

    return fresh


def _word(rng: random.Random, endings: tuple[str, ...], split: str) -> str:
    """A capitalised invented word; a hash of the word says which split owns it."""
    while True:
        word = (
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) + rng.choice(endings)
        ).capitalize()
        if _owner(word) == split:
            return word


def _owner(word: str) -> str:
    """train or test, half of all words each: what makes the splits disjoint in names."""
    return ("train", "test")[hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 2]
