"""Attention for rows that share prefixes, on CPUs: blocks of queries meet the keys up to their end.

In such a row parents stand before children, so that no token looks ahead; but the mask is not the
plain causal one, and the fused kernel then computes the whole square, with the keys copied for each
query head. Here a block of queries is multiplied with the keys up to its own end only, and the
query heads that share a key head go into one matrix product. GPUs keep the fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "optima_lite_blocks"
BLOCK = 256  # queries: large enough for the matrix units, small enough to leave out half the square


def block_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[rows, tokens, heads, width], which is what transformers wants, of `query` [rows, heads,
    tokens, width], `key` and `value` [rows, key heads, tokens, width].

    `attention_mask` [rows, 1, tokens, tokens] is additive and lets no token look ahead. Anything
    else (another mask, a bias, dropout) is left to the fused kernel.
    """
    tokens = query.shape[2]
    special = any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    if (
        attention_mask is None
        or not attention_mask.is_floating_point()  # true and false are not to be added
        or attention_mask.shape[-2:] != (tokens, key.shape[2])
        or special
        or dropout
    ):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    rows, heads, _, width = query.shape
    shared = key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, shared, heads // shared, tokens, width)
    out = []
    # As in the fused kernel, weights have the type of the values; autocast would make them fp32.
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, tokens, BLOCK):
            end = min(start + BLOCK, tokens)
            block = grouped[:, :, :, start:end].reshape(rows, shared, -1, width)
            scores = (block * scale) @ key[:, :, :end].transpose(2, 3)
            scores = scores.view(rows, shared, -1, end - start, end)
            weights = (scores + attention_mask[:, :, None, start:end, :end]).softmax(-1)
            weights = weights.to(value.dtype).view(rows, shared, -1, end)
            said = weights @ value[:, :, :end]
            out.append(said.view(rows, heads, end - start, value.shape[-1]))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, block_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def in_blocks(model: Any) -> Iterator[None]:
    """Inside, a model on the CPU that would use the fused kernel attends in blocks."""
    config = model.config.get_text_config()
    used = getattr(config, "_attn_implementation", None)
    if used != "sdpa" or model.get_input_embeddings().weight.device.type != "cpu":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = used
