"""Preference pairs to token ids, and how they are laid out in steps and rows."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from optima_lite.chat import ChatEncoder
from optima_lite.errors import TrainingError
from optima_lite.records import Pair
from optima_lite.training.encode import dropped_line, fit
from optima_lite.training.pack import Batch, Completion, Trie, collate


@dataclass(frozen=True)
class PairRow:
    """A tokenised pair: two completions of one prompt. `family` is equal for pairs whose prompts
    begin alike: the same task, seen by the same agent."""

    name: str
    family: tuple[str, str]
    chosen: Completion
    rejected: Completion
    cut: int = 0  # tokens removed from partners' turns to fit


@dataclass(frozen=True)
class Part:
    """What is computed at once: rows, and the indices of their pairs, in the order of the
    completions (chosen, rejected, chosen, …). `plain`: every completion has a row of its own."""

    rows: list[Trie]
    pairs: list[int]
    plain: bool = False

    def batch(self, pad: int) -> Batch:
        return collate(self.rows, pad, plain=self.plain)


def encode(
    pairs: Iterable[Pair], chat: ChatEncoder, max_length: int
) -> tuple[list[PairRow], list[str]]:
    """Tokenise all pairs; gives them and the names of those dropped because they do not fit.

    Both turns keep the same prompt: partners' turns are cut as the longer one needs it. Raises
    TrainingError where both turns are the same, one is empty, or no pair is left.
    """
    rows, dropped = [], []
    for number, pair in enumerate(pairs, start=1):
        source = f"{pair.task_id} {pair.agent}".strip()
        name = f"pair {number}" + f" ({source})" * bool(source)
        sides = [chat.encode([*pair.prompt, *side]) for side in (pair.chosen, pair.rejected)]
        if not all(side.spans and side.spans[-1][1] - side.spans[-1][0] > 1 for side in sides):
            raise TrainingError(f"{name}: a turn is empty")
        if sides[0].ids == sides[1].ids:
            raise TrainingError(f"{name}: chosen and rejected are the same")
        excess = max(0, *(len(side.ids) - max_length for side in sides))
        fitted = [fit(side, name, len(side.ids) - excess) for side in sides]
        if fitted[0] is None or fitted[1] is None:
            dropped.append(name)
            continue
        chosen, rejected = (
            Completion(row.ids[: row.spans[-1][1]], row.spans[-1][0]) for row in fitted if row
        )
        family = (pair.task_id or pair.prompt[0]["content"], pair.agent)
        rows.append(PairRow(name, family, chosen, rejected, excess))
    if not rows:
        raise TrainingError(
            f"no pair is left: all {len(dropped)} exceed --max-length {max_length}"
            if dropped
            else "there are no pairs to train on"
        )
    return rows, dropped


def steps(
    rows: Sequence[PairRow],
    batch_size: int,
    epochs: float,
    tokens: int,
    seed: int,
    *,
    plain: bool = False,
) -> list[list[Part]]:
    """The optimiser steps of a run, `batch_size` pairs each, as parts of at most `tokens` tokens.

    Families are shuffled anew in each epoch and stay together, so that their prompts are computed
    once; a family larger than a step goes on in the next.
    """
    per_epoch = -(-len(rows) // batch_size)
    wanted = max(1, round(per_epoch * epochs))
    out: list[list[Part]] = []
    epoch = 0
    while len(out) < wanted:
        order = _order(rows, random.Random(f"{seed}/{epoch}"))
        for start in range(0, len(order), batch_size):
            lay = plain_parts if plain else parts
            out.append(list(lay(rows, order[start : start + batch_size], tokens)))
        epoch += 1
    return out[:wanted]


def _order(rows: Sequence[PairRow], rng: random.Random) -> list[int]:
    families: dict[tuple[str, str], list[int]] = {}
    for i, row in enumerate(rows):
        families.setdefault(row.family, []).append(i)
    shuffled = list(families.values())
    rng.shuffle(shuffled)
    return [i for family in shuffled for i in family]


def parts(rows: Sequence[PairRow], indices: Sequence[int], tokens: int) -> Iterator[Part]:
    """Lay pairs out in rows, a family in as few as fit, and rows in parts.

    A part has at most `tokens` tokens, padding counted, unless a single pair has more.
    """
    laid: list[tuple[Trie, list[int]]] = []
    family: tuple[str, str] | None = None
    for i in indices:
        row = rows[i]
        if row.family == family:
            trie, members = laid[-1]
            # What the rejected turn shares with the chosen one is counted twice: a bound.
            new = trie.new_tokens(row.chosen) + trie.new_tokens(row.rejected)
            fits = len(trie.ids) + new <= tokens
        else:
            fits = False
        if not fits:
            trie, members = Trie(), []
            laid.append((trie, members))
        trie.add(row.chosen)
        trie.add(row.rejected)
        members.append(i)
        family = row.family
    laid.sort(key=lambda pair: -len(pair[0].ids))  # rows of like length side by side
    while laid:
        fit_ = max(1, tokens // len(laid[0][0].ids))
        now, laid = laid[:fit_], laid[fit_:]
        yield Part([trie for trie, _ in now], [i for _, members in now for i in members])


def plain_parts(rows: Sequence[PairRow], indices: Sequence[int], tokens: int) -> Iterator[Part]:
    """The same without sharing anything: two rows a pair."""
    left = sorted(indices, key=lambda i: -_longer(rows[i]))
    while left:
        fit_ = max(1, tokens // (2 * _longer(rows[left[0]])))
        now, left = left[:fit_], left[fit_:]
        sides = [side for i in now for side in (rows[i].chosen, rows[i].rejected)]
        tries = [Trie() for _ in sides]
        for trie, side in zip(tries, sides, strict=True):
            trie.add(side)
        yield Part(tries, now, plain=True)


def _longer(row: PairRow) -> int:
    return max(len(row.chosen.ids), len(row.rejected.ids))


def report(
    rows: Sequence[PairRow], dropped: Sequence[str], made: Sequence[Sequence[Part]], max_length: int
) -> list[str]:
    """What training will see, in words."""
    apart = sum(len(row.chosen.ids) + len(row.rejected.ids) for row in rows)
    computed = sum(len(trie.ids) for step in made for part in step for trie in part.rows)
    seen = sum(len(part.pairs) for step in made for part in step)
    share = computed / seen / (apart / len(rows))
    lengths = [len(r.chosen.ids) - r.chosen.start for r in rows]
    others = [len(r.rejected.ids) - r.rejected.start for r in rows]
    prompts = [row.chosen.start for row in rows]
    return [
        f"{len(rows)} pairs of {len({row.family for row in rows})} views; {len(dropped)} dropped "
        f"(prompt and turns exceed {max_length} tokens), "
        f"{sum(row.cut > 0 for row in rows)} shortened in partners' turns",
        *dropped_line(dropped),
        f"tokens: prompt {_range(prompts)}; chosen {_range(lengths)}; rejected {_range(others)}",
        f"optimiser steps: {len(made)}; shared prefixes leave {share:.0%} of the tokens to compute",
    ]


def marked(row: PairRow, chat: ChatEncoder) -> list[str]:
    """A pair as text: the prompt, then both turns with ⟦ ⟧ around what is compared."""
    decode = chat.tokenizer.decode
    return [
        f"first pair: {row.name}",
        decode(row.chosen.ids[: row.chosen.start]),
        f"chosen ⟦{decode(row.chosen.ids[row.chosen.start :])}⟧",
        f"rejected ⟦{decode(row.rejected.ids[row.rejected.start :])}⟧",
    ]


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}-{max(values)} (mean {sum(values) / len(values):.0f})"
