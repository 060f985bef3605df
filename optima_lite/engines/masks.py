"""Attention masks for models whose layers differ in what they may look at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attention_masks(config: Any, seen: Tensor, distance: Tensor, dtype: torch.dtype) -> Any:
    """Additive masks [rows, 1, tokens, keys]; a dict where the layers differ in kind.

    `seen` [rows, tokens, keys] is true where a token may look at a key; `distance`, of the same
    shape, says how many positions the key is behind. A layer with a sliding window looks no
    further than the window.
    """
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    near = seen & (distance < window) if window else seen
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        return {
            "full_attention": _additive(seen, dtype),
            "sliding_attention": _additive(near, dtype),
        }
    sliding_only = kinds == {"sliding_attention"} or (window and not kinds)
    return _additive(near if sliding_only else seen, dtype)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]
