"""HotpotQA, distractor setting: ten paragraphs, two of them needed, dealt to the agents.

    optima-lite tasks hotpotqa --limit 1000
    optima-lite tasks hotpotqa --split dev --source hotpot_dev_distractor_v1.json

Both schemas are read: the official one (`supporting_facts` [[title, sentence]], `context` [[title,
[sentences]]], `_id`) and the hub's (objects of lists, `id`). As the paper's exchange setting asks,
no agent can answer alone: the *distinct* supporting titles are dealt so that none holds them all,
the other paragraphs so that all hold about the same number. Paragraphs are kept whole.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optima_lite.errors import InputError
from optima_lite.records import Task
from optima_lite.tasks.sources import Row, rows

HUB_ID = "hotpotqa/hotpot_qa"
CONFIG = "distractor"
#: What users call the evaluation split -> its name on the hub. The real test set has no answers.
_ALIASES = {"dev": "validation", "test": "validation"}

Paragraph = tuple[str, str]  # title, text


class HotpotQA:
    """HotpotQA as a `base.Dataset`."""

    name = "hotpotqa"
    splits = ("train", "validation", "dev", "test")
    settings: Mapping[str, str] = {"config": f"configuration of the hub data set [{CONFIG}]"}

    def tasks(
        self,
        *,
        split: str,
        source: str | None = None,
        agents: int = 2,
        seed: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Task]:
        """One task a row, in the order of the source. Raises InputError with the row's place."""
        split = _ALIASES.get(split, split)
        config = (settings or {}).get("config", CONFIG)
        for row in rows(source or HUB_ID, split=split, config=config):
            task = _task(row, split, agents, seed)
            try:
                task.check()
            except InputError as error:
                raise row.error(error.reason) from None
            yield task


def _task(row: Row, split: str, agents: int, seed: int) -> Task:
    question, answer = _squash(row.text("question")), row.text("answer")
    task_id = f"hotpotqa/{split}/{_native_id(row, question, answer)}"
    supporting = list(dict.fromkeys(_squash(title) for title in _supporting_titles(row)))
    # A text seed: hashed by SHA-512, the same on every machine, and no row depends on another.
    rng = random.Random(f"{seed} {task_id}")
    contexts, holders = deal(_paragraphs(row), supporting, agents, rng)
    meta: dict[str, Any] = {
        key: row.data[key] for key in ("type", "level") if isinstance(row.data.get(key), str)
    }
    meta |= {"supporting": supporting, "holders": holders}
    return Task(
        id=task_id,
        setting="exchange",
        question=question,
        answers=(answer,),
        metric="f1",
        contexts=tuple(
            tuple(f"{title}: {text}".rstrip() for title, text in share) for share in contexts
        ),
        meta=meta,
    )


def deal(
    paragraphs: Sequence[Paragraph], supporting: Sequence[str], agents: int, rng: random.Random
) -> tuple[list[list[Paragraph]], dict[str, int]]:
    """Deal paragraphs to agents; returns each agent's share and {supporting title: its holder}.

    Distinct supporting titles go round over the shuffled agents: with two or more titles and
    agents, nobody holds all. Paragraphs of one supporting title stay together. Every other
    paragraph goes to an agent that has fewest so far; at last each share is shuffled.
    """
    order = list(range(agents))
    rng.shuffle(order)
    present = {title for title, _ in paragraphs}
    holders = {
        title: order[i % agents] for i, title in enumerate(t for t in supporting if t in present)
    }
    shares: list[list[Paragraph]] = [[] for _ in order]
    others = []
    for paragraph in paragraphs:
        if paragraph[0] in holders:
            shares[holders[paragraph[0]]].append(paragraph)
        else:
            others.append(paragraph)
    rng.shuffle(others)
    for paragraph in others:
        shares[min(order, key=lambda agent: len(shares[agent]))].append(paragraph)
    for share in shares:
        rng.shuffle(share)
    return shares, holders


def join(sentences: Sequence[str]) -> str:
    """The paragraph's text, whole, with single spaces.

    Sentences bring their own leading space, and a piece that the splitter cut off inside a sentence
    (`."`) brings none, so plain concatenation is right. Two repairs: a space where a sentence ends
    and a word follows, and spaces throughout where no sentence brings one (2WikiMultiHopQA).
    """
    if not any(sentence[:1].isspace() for sentence in sentences[1:]):
        return _squash(" ".join(sentences))
    text = ""
    for sentence in sentences:
        if text.endswith((".", "!", "?")) and sentence[:1].isalnum():
            text += " "
        text += sentence
    return _squash(text)


def _paragraphs(row: Row) -> list[Paragraph]:
    """(title, text) of each paragraph of the context, from either schema."""
    paragraphs = []
    for i, (title, sentences) in enumerate(_pairs(row, "context", "title", "sentences")):
        if not isinstance(title, str) or not isinstance(sentences, list):
            raise row.error(f'"context" entry {i + 1} is not a title and a list of sentences')
        if not all(isinstance(sentence, str) for sentence in sentences):
            raise row.error(f'"context" entry {i + 1} has a sentence that is not text')
        paragraphs.append((_squash(title), join(sentences)))
    if not paragraphs:
        raise row.error('"context" is empty')
    return paragraphs


def _supporting_titles(row: Row) -> list[str]:
    titles = [title for title, _ in _pairs(row, "supporting_facts", "title", "sent_id")]
    if not all(isinstance(title, str) for title in titles):
        raise row.error('"supporting_facts" has a title that is not text')
    return titles


def _pairs(row: Row, key: str, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs from `[[a, b], …]` (official) or `{first: [a, …], second: [b, …]}` (hub)."""
    value = row.data.get(key)
    if value is None:
        raise row.error(f'missing "{key}"')
    if isinstance(value, dict):
        for part in (first, second):
            if not isinstance(value.get(part), list):
                raise row.error(f'"{key}.{part}" is missing or not a list')
        if len(value[first]) != len(value[second]):
            raise row.error(f'"{key}" has {first} and {second} of different lengths')
        return list(zip(value[first], value[second], strict=True))
    if not isinstance(value, list):
        raise row.error(f'"{key}" must be a list or an object, found {type(value).__name__}')
    for i, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise row.error(f'"{key}" entry {i + 1} is not a pair')
    return [(a, b) for a, b in value]


def _native_id(row: Row, question: str, answer: str) -> str:
    """The row's own id; without one, 16 hex digits that question and answer decide."""
    for key in ("_id", "id"):
        value = row.data.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if type(value) is int:
            return str(value)
    return hashlib.blake2b(f"{question}\n{answer}".encode(), digest_size=8).hexdigest()


def _squash(text: str) -> str:
    return " ".join(text.split())
