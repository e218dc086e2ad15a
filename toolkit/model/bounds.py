"""Where packed samples begin, for an attention that is told instead of given a mask.

The loader knows where samples begin, and the loss hands it to the model as arguments of the forward, by the names that
transformers has for flash attention: every layer gets them, and gets them again when it is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from toolkit.data.collate import Bounds
from toolkit.errors import RunFailed
from toolkit.upstream.transformers import attention_of

TAKES_BOUNDS: dict[str, str] = {}
"""Attentions that take them, by transformers' name: the recipe's. Whoever registers such an attention adds it."""


def bounds_arguments(config: Any, inputs: Mapping[str, torch.Tensor], bounds: Bounds | None) -> dict[str, Any]:
    """Further arguments of the forward of a model whose attention takes bounds; {} for every other.

    ``inputs``: of the model, (batch, length). ``bounds``: of packed samples; rows that are not packed are one sample
    each, since padding is to their right. Raises RunFailed for packed rows without ``bounds``.
    """
    name = TAKES_BOUNDS.get(attention_of(config) or "")
    if name is None:
        return {}
    if bounds is None and "position_ids" in inputs:
        raise RunFailed(f"model.attention: {name}: it is not known where the samples of packed rows begin")
    if bounds is None:
        rows, length = inputs["input_ids"].shape
        device = inputs["input_ids"].device
        bounds = Bounds(torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device), length)
    starts, longest = bounds.starts, bounds.longest
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
