"""Prefix sharing: sequences that begin alike in one row, each common token once.

A pair's chosen and rejected turns follow the same conversation, and the pairs of one tree follow
conversations that begin alike. Laid out as a trie, such sequences need one forward pass over their
distinct tokens: every token sees its ancestors only, at the position that it has in its sequence.
Log-probabilities and gradients are those of the sequences computed one by one, up to rounding.

Models whose attention takes no such mask get every sequence in a row of its own (`plain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Completion:
    """Token ids of a prompt with a completion: `ids[start:]` is the completion, not empty."""

    ids: list[int]
    start: int


@dataclass
class Trie:
    """Sequences laid out as one row of tokens, parents before children.

    Per token of the row: `ids`, `positions` (its index in its sequences) and `parents` (index in
    the row, -1 for a first token). Per completion: `sources`, the row indices whose hidden states
    predict its tokens, and `targets`, these tokens.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sources: list[list[int]] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, completion: Completion) -> None:
        """Add a sequence; what it has in common with those before is not added again."""
        here, path = -1, []
        for position, token in enumerate(completion.ids):
            child = self._children.get((here, token))
            if child is None:
                child = len(self.ids)
                self._children[here, token] = child
                self.ids.append(token)
                self.positions.append(position)
                self.parents.append(here)
            here = child
            path.append(here)
        self.sources.append(path[completion.start - 1 : -1])
        self.targets.append(completion.ids[completion.start :])

    def new_tokens(self, completion: Completion) -> int:
        """How many tokens `add` would add."""
        here = -1
        for known, token in enumerate(completion.ids):
            child = self._children.get((here, token))
            if child is None:
                return len(completion.ids) - known
            here = child
        return 0

    def seen(self) -> Tensor:
        """[tokens, tokens], true where the token of the row may look at the token of the column:
        at itself and at its ancestors."""
        size = len(self.ids)
        seen = torch.eye(size, dtype=torch.bool)
        for token, parent in enumerate(self.parents):
            if parent >= 0:
                seen[token] |= seen[parent]
        return seen


@dataclass(frozen=True)
class Batch:
    """Rows ready for a model: `ids` and `positions` [rows, tokens]; `real` [rows, tokens], false
    for padding; `seen` [rows, tokens, tokens], or None where a row is one sequence.

    `sources` [predictions, 2] are (row, token) of the hidden states that predict, in the order of
    the completions; `targets` [predictions] the tokens they predict; `owners` [predictions] the
    number of the completion, counted over all rows.
    """

    ids: Tensor
    positions: Tensor
    real: Tensor
    seen: Tensor | None
    sources: Tensor
    targets: Tensor
    owners: Tensor

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return replace(self, **moved)


def collate(rows: Sequence[Trie], pad: int, *, plain: bool = False) -> Batch:
    """Pad rows on the right. Padding sees itself only, so that no softmax is empty.

    `plain`: every row is one sequence, and a model's own causal mask will do.
    """
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), pad)
    positions = torch.zeros((len(rows), width), dtype=torch.long)
    real = torch.zeros((len(rows), width), dtype=torch.bool)
    seen = None if plain else torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    sources, targets, owners = [], [], []
    number = 0
    for i, row in enumerate(rows):
        size = len(row.ids)
        ids[i, :size] = torch.tensor(row.ids)
        positions[i, :size] = torch.tensor(row.positions)
        real[i, :size] = True
        if seen is not None:
            seen[i, :size, :size] = row.seen()
        for where, what in zip(row.sources, row.targets, strict=True):
            sources += [(i, token) for token in where]
            targets += what
            owners += [number] * len(what)
            number += 1
    said = (torch.tensor(values) for values in (sources, targets, owners))
    return Batch(ids, positions, real, seen, *said)
