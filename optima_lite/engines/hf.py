"""The transformers engine: continuous batches over slots, on top of a prefix store.

Every decoding step says one token in each of up to `slots` running turns. A turn that ends makes
room at once; the next one's prompt is computed only from where no earlier sequence had it. All
lengths are real lengths (slots are aligned at position 0), so a turn's neighbours change nothing
but rounding.

Draws: one uniform number per token, from the request's own seed, looked up in the cumulative
distribution. (A Gumbel number per vocabulary entry would do the same at 49 152 times the cost.)
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optima_lite.chat import ChatEncoder
from optima_lite.engines.base import Completion, Pull, Request, Utterance
from optima_lite.engines.kv import PrefixStore, SlotCache, common_prefix
from optima_lite.engines.loading import (
    LoadOptions,
    ModelSpec,
    adapter_off,
    load_for_inference,
    load_tokenizer,
    resolve,
)
from optima_lite.engines.masks import attention_masks
from optima_lite.errors import ModelError

_PREFILL_TOKENS = 512  # of one batch of prompts: enough to fill the matrix units
_WORTH_WAITING = 16  # tokens another prompt must have ahead of the store to be waited for
_LOSS_TOKENS = 2048  # tokens of one batch of texts to score: bounds the logits to a few 100 MB
_STORE_SHARE = 0.5  # of the cache budget; the rest is for the slots


@dataclass(eq=False)
class _Running:
    """A turn that is being said in some slot."""

    request: Request
    prompt: list[int]
    rng: random.Random
    said: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Positions whose keys and values are in the slot."""
        return len(self.prompt) + max(0, len(self.said) - 1)

    @property
    def fed(self) -> list[int]:
        """The tokens at these positions."""
        return (self.prompt + self.said)[: self.known]


class HFEngine:
    """Generation and losses with a transformers causal language model.

    `slots`: turns that run at once. `context`: window in tokens (default: the model's).
    `cache_gb`: memory for keys and values, slots and prefix store together.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        slots: int = 64,
        context: int | None = None,
        cache_gb: float = 4.0,
    ):
        self.name = name
        self.model = model
        self.chat = ChatEncoder(tokenizer)
        self.slots = slots
        window = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        self.context = min(window, context or window)
        self._budget = int(cache_gb * 2**30)
        self._stops = self._stop_tokens()
        parameters = inspect.signature(model.forward).parameters
        # transformers renames this argument in 5.x.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._device = model.get_input_embeddings().weight.device
        self._dtype = model.get_input_embeddings().weight.dtype

    @classmethod
    def load(cls, model: str | ModelSpec, options: LoadOptions, **kwargs: Any) -> HFEngine:
        """The engine of a model name (see engines/loading.py)."""
        spec = resolve(model) if isinstance(model, str) else model
        tokenizer = load_tokenizer(spec, options)
        return cls(load_for_inference(spec, options), tokenizer, spec.name, **kwargs)

    @classmethod
    def load_with_base(
        cls, policy: ModelSpec, base: ModelSpec, options: LoadOptions, **kwargs: Any
    ) -> tuple[HFEngine, HFEngine]:
        """The engines of a policy and of M_base; `kwargs` are the policy's.

        One copy of the weights where the policy is the base itself, or an adapter that stands
        beside 4-bit weights. An adapter merged into its base (see load_for_inference) cannot be
        switched off: then there are two copies.
        """
        engine = cls.load(policy, options, **kwargs)
        if policy == base:
            return engine, engine
        if policy.without_adapter == base and options.load == "4bit":
            return engine, WithoutAdapter(engine.model, load_tokenizer(base, options), base.name)
        return engine, cls.load(base, options)

    # -- generation -------------------------------------------------------------------------

    def generate(self, pull: Pull) -> Iterator[tuple[Request, Completion]]:
        """See Engine.generate. Yields in the order in which turns finish."""
        cache = SlotCache(self.slots)
        store = PrefixStore(int(self._budget * _STORE_SHARE))
        running: list[_Running | None] = []  # index = slot
        while True:
            holes = [i for i, turn in enumerate(running) if turn is None]
            room = self._room(cache, len(running) - len(holes))
            requests = list(pull(room)) if room else []
            starting: dict[int, _Running] = {}
            for request in requests:
                prompt = self.chat.prompt(request.messages)
                if len(prompt) >= self.context:
                    yield request, Completion("", 0, "context")
                    continue
                if holes:
                    slot = holes.pop(0)
                else:
                    slot = len(running)
                    running.append(None)
                running[slot] = starting[slot] = _Running(
                    request, prompt, random.Random(request.seed)
                )
            if starting:
                self._prefill(cache, store, starting)
            else:
                self._close_gaps(cache, running)
                turns = [turn for turn in running if turn]
                if not turns and not requests:
                    return
                if turns:
                    self._step(cache, turns)
            for slot, turn in enumerate(running):
                if turn and self._stop(turn):
                    yield self._finish(cache, store, running, slot)

    def _room(self, cache: SlotCache, busy: int) -> int:
        """How many more turns fit: slots, and the memory they would take at today's length."""
        if not cache.bytes_per_token:
            return 1 - busy  # the first turn shows what a token takes
        budget = self._budget * (1 - _STORE_SHARE)
        fit = min(self.slots, int(budget // (cache.bytes_per_token * cache.length)))
        return max(fit - busy, 0 if busy else 1)

    def _prefill(self, cache: SlotCache, store: PrefixStore, starting: dict[int, _Running]) -> None:
        """Bring slots to the end of their prompts, a few at a time, and draw the first tokens."""
        batch: dict[int, tuple[_Running, int]] = {}  # slot -> turn, tokens already known

        def flush() -> None:
            if batch:
                self._prefill_batch(cache, store, batch)
                batch.clear()

        for slot, turn in starting.items():
            known, kv = store.longest(turn.prompt)
            others = [other.prompt for other, _ in batch.values()]
            ahead = max((common_prefix(other, turn.prompt) for other in others), default=0)
            if ahead > known + _WORTH_WAITING:
                # Another conversation of the same task is in this batch: take its work.
                flush()
                known, kv = store.longest(turn.prompt)
            known = min(known, len(turn.prompt) - 1)  # the last token's logits are wanted
            new = [len(t.prompt) - k for t, k in batch.values()]
            widest = max(*new, len(turn.prompt) - known) if new else 0
            if batch and widest * (len(batch) + 1) > _PREFILL_TOKENS:
                flush()
            if kv is not None and known:
                cache.load(slot, kv, known)
            batch[slot] = (turn, known)
        flush()

    @torch.inference_mode()
    def _prefill_batch(
        self, cache: SlotCache, store: PrefixStore, batch: dict[int, tuple[_Running, int]]
    ) -> None:
        width = max(len(turn.prompt) - known for turn, known in batch.values())
        positions, tokens, last = [], [], []
        for turn, known in batch.values():
            new = turn.prompt[known:]
            positions.append(list(range(known, known + width)))
            tokens.append(new + [0] * (width - len(new)))
            last.append(len(new) - 1)
        logits = self._forward(cache, list(batch), positions, tokens, last)
        for (slot, (turn, known)), row in zip(batch.items(), logits, strict=True):
            self._say(turn, row)
            if len(turn.prompt) > 2 * known:
                # Mostly new, so likely a task's prompt that its other conversations will ask for.
                store.put(turn.prompt, cache.save(slot, len(turn.prompt)))

    @torch.inference_mode()
    def _step(self, cache: SlotCache, turns: list[_Running]) -> None:
        """One more token in each of the first len(turns) slots."""
        positions = [[turn.known] for turn in turns]
        tokens = [[turn.said[-1]] for turn in turns]
        rows = list(range(len(turns)))
        logits = self._forward(cache, rows, positions, tokens, [0] * len(turns))
        for turn, row in zip(turns, logits, strict=True):
            self._say(turn, row)

    def _forward(
        self,
        cache: SlotCache,
        rows: list[int],
        positions: list[list[int]],
        tokens: list[list[int]],
        last: list[int],
    ) -> torch.Tensor:
        """Logits [rows, vocabulary], fp32, after token `last[i]` of row i.

        `tokens` and `positions` are [rows, n]. Raises ModelError on NaN.
        """
        where = torch.tensor(positions, device=self._device)
        cache.aim(torch.tensor(rows, device=self._device), where)
        wanted = sorted({*last})
        out = self.model(
            input_ids=torch.tensor(tokens, device=self._device),
            position_ids=where,
            attention_mask=self._masks(where, cache.get_seq_length()),
            use_cache=True,
            logits_to_keep=torch.tensor(wanted, device=self._device),
            **{self._cache_argument: cache},
        )
        columns = torch.tensor([wanted.index(i) for i in last], device=self._device)
        logits = out.logits[torch.arange(len(rows), device=self._device), columns].float()
        if bool(torch.isnan(logits.max())):  # max passes NaN on
            raise ModelError(f"{self.name} gives logits that are no numbers{self._hint()}")
        return logits

    def _masks(self, positions: torch.Tensor, length: int) -> Any:
        """Additive masks [rows, 1, tokens, length], a dict where the layers differ in kind."""
        behind = positions[..., None] - torch.arange(length, device=self._device)
        return attention_masks(self.model.config, behind >= 0, behind, self._dtype)

    def _hint(self) -> str:
        broken = self._dtype == torch.float32
        return ": its weights are broken" if broken else ": try --load fp32"

    def _say(self, turn: _Running, logits: torch.Tensor) -> None:
        """Draw the next token of a turn from logits [vocabulary]."""
        temperature = turn.request.temperature
        if temperature == 0:
            turn.said.append(int(logits.argmax()))
            return
        cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
        draw = torch.tensor([turn.rng.random()], device=logits.device) * cumulative[-1]
        token = int(torch.searchsorted(cumulative, draw, right=True))
        turn.said.append(min(token, logits.shape[-1] - 1))

    def _stop(self, turn: _Running) -> str | None:
        if turn.said[-1] in self._stops:
            return "end"
        if len(turn.said) >= turn.request.max_tokens:
            return "length"
        if len(turn.prompt) + len(turn.said) >= self.context:
            return "context"
        return None

    def _finish(
        self, cache: SlotCache, store: PrefixStore, running: list[_Running | None], slot: int
    ) -> tuple[Request, Completion]:
        turn = running[slot]
        assert turn is not None
        stop = self._stop(turn)
        assert stop is not None
        store.put(turn.fed, cache.save(slot, turn.known))
        running[slot] = None
        said = turn.said[:-1] if stop == "end" else turn.said
        text = self.chat.decode(said)
        return turn.request, Completion(text, self.count_tokens(text), stop)

    def _close_gaps(self, cache: SlotCache, running: list[_Running | None]) -> None:
        """Move turns from the end into free slots, so that steps run over full rows only."""
        while running and None in running:
            last = running.pop()
            if last is not None:
                slot = running.index(None)
                cache.move(len(running), slot, last.known)
                running[slot] = last

    def _stop_tokens(self) -> set[int]:
        config = getattr(self.model, "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
        more = eos if isinstance(eos, list) else [eos]
        known = [self.chat.end_of_turn, self.chat.tokenizer.eos_token_id, *more]
        return {token for token in known if token is not None}

    # -- losses -----------------------------------------------------------------------------

    @torch.inference_mode()
    def losses(self, utterances: Sequence[Utterance]) -> list[float | None]:
        """See Engine.losses. A text is scored as a reply: after BOS and the assistant's header,
        and after `context` as a user message where there is one. End-of-turn does not count."""
        rows: list[tuple[list[int], int]] = []
        for utterance in utterances:
            ids = self.chat.reply(utterance.text) if utterance.text.strip() else []
            if utterance.context is None:
                before = self.chat.reply_header()
            else:
                before = self.chat.prompt([{"role": "user", "content": utterance.context}])
            rows.append((before + ids, len(ids)))
        out: list[float | None] = [None] * len(rows)
        # Longest first: neighbours are of like length, and memory is known from the start.
        order = sorted((i for i, row in enumerate(rows) if row[1]), key=lambda i: -len(rows[i][0]))
        while order:
            fit = max(1, _LOSS_TOKENS // len(rows[order[0]][0]))
            batch, order = order[:fit], order[fit:]
            for i, loss in zip(batch, self._batch_losses([rows[i] for i in batch]), strict=True):
                out[i] = loss
        return out

    def _batch_losses(self, rows: list[tuple[list[int], int]]) -> list[float | None]:
        width = max(len(ids) for ids, _ in rows)
        tokens = torch.zeros((len(rows), width), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, (ids, _) in enumerate(rows):
            tokens[i, : len(ids)] = torch.tensor(ids)
            mask[i, : len(ids)] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        out: list[float | None] = []
        for i, (ids, scored) in enumerate(rows):
            start = max(len(ids) - scored, 1)  # without a header the first token has no context
            logps = torch.log_softmax(logits[i, start - 1 : len(ids) - 1].float(), dim=-1)
            picked = logps.gather(-1, tokens[i, start : len(ids), None])
            out.append(-float(picked.mean()) if len(picked) else None)
        if any(loss is not None and math.isnan(loss) for loss in out):
            raise ModelError(f"{self.name} gives losses that are no numbers{self._hint()}")
        return out

    def count_tokens(self, text: str) -> int:
        """See Engine.count_tokens."""
        return len(self.chat.text(text))


class WithoutAdapter(HFEngine):
    """The base of another engine's model: its losses are computed with the adapter switched off."""

    def losses(self, utterances: Sequence[Utterance]) -> list[float | None]:
        """See Engine.losses."""
        with adapter_off(self.model):
            return super().losses(utterances)
