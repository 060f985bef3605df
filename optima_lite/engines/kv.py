"""Keys and values: the slots that running turns write to, and the store of known prefixes.

A slot holds one sequence from position 0 on, so that every position of every slot means the same
thing and a prefix can be copied in and out. The store answers "how much of this prompt was
computed before": the N conversations of a task share its prompt, and an agent's next turn shares
everything up to its last one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

_BLOCK = 16  # tokens between the points at which a prefix can be looked up
_GROWTH = 128  # slots are lengthened by so many tokens at least

#: Per layer, keys and values of one sequence: 2 tensors of shape [kv_heads, tokens, head_dim].
KV = list[tuple[torch.Tensor, torch.Tensor]]


class SlotCache(Cache):
    """Keys and values of several sequences: per layer [slots, kv_heads, length, head_dim].

    Slots (up to `limit`) and length grow with what runs at once. `aim` says where the next forward
    pass stands; `update` is called by the model's attention.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(layers=[])
        self._limit = limit
        self.slots = 0
        self.length = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._rows = torch.zeros(0, dtype=torch.long)
        self._positions = torch.zeros(0, dtype=torch.long)
        self._all_in_order = True
        self._seen = 0

    def aim(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """The next pass computes `positions` [rows, tokens] of the slots `rows` [rows].

        A row shorter than the widest is padded with the positions that follow it. What is written
        there is never looked at: a position is written anew before the first token that sees it.
        """
        self._rows, self._positions = rows[:, None], positions
        self._all_in_order = bool((rows == torch.arange(len(rows), device=rows.device)).all())
        self._seen = int(positions.max()) + 1
        self._hold(int(rows.max()) + 1, self._seen)

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values [rows, kv_heads, tokens, head_dim]; give back what these rows
        may look at, [rows, kv_heads, seen, head_dim]."""
        if layer_idx not in self._keys:
            shape = (self.slots, key_states.shape[1], self.length)
            self._keys[layer_idx] = key_states.new_zeros((*shape, key_states.shape[3]))
            self._values[layer_idx] = value_states.new_zeros((*shape, value_states.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key_states.transpose(1, 2)
        values[self._rows, :, self._positions] = value_states.transpose(1, 2)
        if self._all_in_order:  # a view; else the rows have to be gathered
            rows = slice(0, len(self._rows))
            return keys[rows, :, : self._seen], values[rows, :, : self._seen]
        picked = self._rows[:, 0]
        return keys[picked, :, : self._seen], values[picked, :, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen

    @torch.inference_mode()
    def load(self, slot: int, kv: KV, tokens: int) -> None:
        """Copy the first `tokens` positions of `kv` into a slot."""
        self._hold(slot + 1, tokens)
        for layer, (keys, values) in enumerate(kv):
            self._keys[layer][slot, :, :tokens] = keys[:, :tokens]
            self._values[layer][slot, :, :tokens] = values[:, :tokens]

    @torch.inference_mode()
    def save(self, slot: int, tokens: int) -> KV:
        """A copy of a slot's first `tokens` positions."""
        return [
            (self._keys[i][slot, :, :tokens].clone(), self._values[i][slot, :, :tokens].clone())
            for i in range(len(self._keys))
        ]

    @torch.inference_mode()
    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot's first `tokens` positions over another slot's."""
        for store in (self._keys, self._values):
            for buffer in store.values():
                buffer[target, :, :tokens] = buffer[source, :, :tokens]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence over all layers; 0 before the first pass."""
        return sum(
            buffer.shape[1] * buffer.shape[3] * buffer.element_size()
            for store in (self._keys, self._values)
            for buffer in store.values()
        )

    def _hold(self, slots: int, tokens: int) -> None:
        """Make room for so many slots and tokens, and for more, since growing copies everything."""
        if slots > self.slots:
            self._resize(max(slots, min(2 * self.slots, self._limit)), self.length)
        if tokens > self.length:
            whole = -(-tokens // _GROWTH) * _GROWTH
            self._resize(self.slots, max(whole, self.length + self.length // 4))

    @torch.inference_mode()
    def _resize(self, slots: int, length: int) -> None:
        for store in (self._keys, self._values):
            for layer, old in store.items():
                new = old.new_zeros((slots, old.shape[1], length, old.shape[3]))
                new[: self.slots, :, : self.length] = old
                store[layer] = new
        self.slots, self.length = slots, length


@dataclass(eq=False)
class _Entry:
    ids: tuple[int, ...]
    kv: KV
    size: int
    marks: list[int]


class PrefixStore:
    """Computed prefixes, the least recently used dropped when `limit` bytes are exceeded."""

    def __init__(self, limit: int):
        self.limit = limit
        self.size = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._index: dict[int, dict[int, _Entry]] = {}

    def put(self, ids: Sequence[int], kv: KV) -> None:
        """Keep the keys and values of `ids`. Entries that are a prefix of it are dropped: this
        one serves for them."""
        size = sum(k.nbytes + v.nbytes for k, v in kv)
        if size > self.limit:
            return
        marks = _marks(ids)
        entry = _Entry(tuple(ids), kv, size, marks)
        if marks:
            for other in list(self._index.get(marks[0], {}).values()):
                if entry.ids[: len(other.ids)] == other.ids:
                    self._drop(other)
        self._entries[id(entry)] = entry
        for mark in marks:
            self._index.setdefault(mark, {})[id(entry)] = entry
        self.size += size
        while self.size > self.limit:
            self._drop(next(iter(self._entries.values())))

    def longest(self, ids: Sequence[int]) -> tuple[int, KV | None]:
        """How many of the first `ids` are known, and an entry that has them."""
        best, found = 0, None
        for mark in reversed(_marks(ids)):
            for entry in self._index.get(mark, {}).values():
                shared = common_prefix(entry.ids, ids)
                if shared > best:
                    best, found = shared, entry
            if found:
                self._entries.move_to_end(id(found))
                return best, found.kv
        return 0, None

    def _drop(self, entry: _Entry) -> None:
        del self._entries[id(entry)]
        for mark in entry.marks:
            del self._index[mark][id(entry)]
            if not self._index[mark]:
                del self._index[mark]
        self.size -= entry.size


def _marks(ids: Sequence[int]) -> list[int]:
    """A hash of every prefix that is a whole number of blocks long."""
    marks, state = [], 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        state = hash((state, tuple(ids[end - _BLOCK : end])))
        marks.append(state)
    return marks


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    for i in range(length):
        if a[i] != b[i]:
            return i
    return length
