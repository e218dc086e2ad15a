"""Attention over packed rows on a GPU, in one call of torch's ``varlen_attn``: ``model.attention: varlen``.

Its layers are told where samples begin (toolkit/model/bounds.py). No mask is made, so nothing looks for samples in the
positions, and the host reads nothing from the device.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.model.bounds import TAKES_BOUNDS
from toolkit.options.varlen.apply import attention_of_whole_rows, check_causal
from toolkit.options.varlen.spec import NEEDS, VARLEN, varlen_capability_message

VARLEN_ON_GPU = "varlen_on_gpu"
"""transformers' name of it."""
_DTYPES = (torch.bfloat16, torch.float16)


def register_varlen_on_gpu(source: str) -> str:
    """Let transformers' models use it by its name, which is returned. Raises InputError for a GPU that does not
    have it."""
    from transformers import AttentionInterface

    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < NEEDS:
        raise InputError(f"{source}: model.attention: varlen {varlen_capability_message(found)}")
    # Without a function for masks of this name, transformers (5.23.0, masking_utils.py) makes none and reads nothing.
    AttentionInterface.register(VARLEN_ON_GPU, attention_on_gpu)
    TAKES_BOUNDS[VARLEN_ON_GPU] = VARLEN
    return VARLEN_ON_GPU


def attention_on_gpu(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` (batch, heads, length, size), ``key`` and ``value`` (batch, key heads, length, size), in 16 bits or
    under autocast to them; ``options`` have ``cu_seq_lens_q``, int32 (samples + 1,), and ``max_length_q``. Returns
    (batch, length, heads, size).

    On a CPU, where models are merged and inspected, without these: rows that are one sample each. Raises InputError for
    what the kernel cannot do.
    """
    check_causal(module, options)
    starts = options.get("cu_seq_lens_q")
    if starts is None and query.device.type == "cpu":
        return attention_of_whole_rows(module, query, key, value, None, dropout, scaling)
    if starts is None:
        raise InputError(
            "model.attention: varlen: this model does not hand the arguments of its forward to its attention; use sdpa"
        )
    if dropout:
        raise InputError(f"model.attention: varlen has no dropout on a GPU, but this model has {dropout}; use sdpa")
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    if dtype not in _DTYPES or value.shape[-1] != query.shape[-1]:
        raise InputError(
            "model.attention: varlen: on a GPU it takes bf16 or fp16, and values as wide as queries; here they are "
            f"{dtype}, {value.shape[-1]} and {query.shape[-1]}; use sdpa"
        )
    from torch.nn.attention.varlen import varlen_attn

    longest = options["max_length_q"]
    # (tokens, heads, size). Rotary tables may be wider than the products, and autocast does not know the operator.
    q, k, v = (one.transpose(1, 2).flatten(0, 1).to(dtype) for one in (query, key, value))
    # Its window counts the tokens to the left, transformers' the token itself too.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output = varlen_attn(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None
