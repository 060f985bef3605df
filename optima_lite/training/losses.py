"""Losses as pure functions of logits, and logits on completion positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optima_lite.engines.masks import attention_masks
from optima_lite.training.encode import IGNORED
from optima_lite.training.pack import Batch


def sft_loss(logits: Tensor, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Negative log-likelihood of `targets`, summed, over `count` tokens.

    `logits` [tokens, vocabulary], any dtype, computed in fp32; `targets` [tokens], ids to predict.
    `count` is the number of trained tokens of the whole optimiser step (None: of this call), so
    that every trained token weighs the same however a step is cut into micro-batches. Nats, ≥ 0.
    """
    total = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
    return total / (len(targets) if count is None else count)


def trained_logits(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocabulary] that predict every trained label, and these labels [tokens].

    `labels` [rows, length] holds IGNORED where nothing is trained. Only the hidden states in front
    of trained tokens go through the vocabulary projection, which on a small model with a large
    vocabulary is most of the memory and much of the time.
    """
    predicts = torch.zeros_like(labels, dtype=torch.bool)
    predicts[:, :-1] = labels[:, 1:] != IGNORED
    with only_positions(model, predicts):
        logits = model(**inputs, use_cache=False).logits
    return logits[0], labels[:, 1:][predicts[:, :-1]]


def completion_logps(model: Any, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of completions in rows that share prefixes: summed [count], in nats, and
    their numbers of tokens [count]. One forward pass; the vocabulary projection runs once for each
    hidden state that predicts something.
    """
    wanted = torch.zeros_like(batch.ids, dtype=torch.bool)
    wanted[batch.sources[:, 0], batch.sources[:, 1]] = True
    if batch.seen is None:
        inputs: dict[str, Any] = {"attention_mask": batch.real.long()}
    else:
        masks = _tree_masks(getattr(model, "module", model), batch, batch.seen)
        inputs = {"attention_mask": masks, "position_ids": batch.positions}
    with only_positions(model, wanted):
        logits = model(input_ids=batch.ids, use_cache=False, **inputs).logits[0]
    # Where a token predicts the first tokens of several completions, its logits are there once.
    place = torch.cumsum(wanted.flatten(), 0) - 1
    rows = place[batch.sources[:, 0] * batch.ids.shape[1] + batch.sources[:, 1]]
    logps = -torch.nn.functional.cross_entropy(
        logits.float()[rows], batch.targets, reduction="none"
    )
    sums = logps.new_zeros(count).index_add(0, batch.owners, logps)
    return sums, torch.bincount(batch.owners, minlength=count)


def _tree_masks(model: Any, batch: Batch, seen: Tensor) -> Any:
    behind = batch.positions[:, :, None] - batch.positions[:, None, :]
    dtype = model.get_input_embeddings().weight.dtype
    if torch.is_autocast_enabled(batch.ids.device.type):
        dtype = torch.get_autocast_dtype(batch.ids.device.type)
    return attention_masks(model.config, seen, behind, dtype)


def dpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """DPO per pair, [pairs]: −log σ(β · (chosen − rejected)), where both are log-probabilities of
    the policy minus those of the reference, in nats. ln 2 where the policy is the reference.
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected))


@contextmanager
def only_positions(model: Any, mask: Tensor) -> Iterator[None]:
    """Inside, the output projection sees the hidden states where `mask` [rows, length] is true, as
    one row [1, tokens, width]. A hook, so that whatever a model does to its logits afterwards
    (scaling, soft caps) still happens."""

    def pick(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][mask][None], *args[1:])

    inner = getattr(model, "module", model)  # the model inside DistributedDataParallel
    handle = inner.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
