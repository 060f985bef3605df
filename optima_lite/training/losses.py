"""Losses as pure functions of logits, and logits on completion positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optima_lite.training.encode import IGNORED


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
