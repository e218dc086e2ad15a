"""Attention over packed rows, one sample after another: ``model.attention: varlen`` without a GPU.

transformers' sdpa computes a packed row's whole square and masks what joins two samples. Here each sample is a call of
sdpa by itself, causal without a mask: the work is the sum of the samples' squares. In place of a mask the layers pass
on where samples begin, which is found in transformers' own mask function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.options.varlen.spec import VARLEN


def register_varlen(*, traced: bool = False) -> str:
    """Let transformers' models use the attention of a CPU by its name, which is returned. ``traced``: one of rows
    that are one sample each, which reads no values."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    name, attend = ("planned_samples", attention_of_whole_rows) if traced else (VARLEN, attention)
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, flash_attention_mask if traced else beginnings)
    return name


def beginnings(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Where the samples of a micro-batch begin, and its end: int64, ascending, in its rows joined to one.

    ``mask_function``: transformers', of (batch, head, query, key); a sample ends where a token does not attend to the
    one before it. Padding is to the right of a row (``attention_mask``: (batch, length), False there), where no token
    of a causal model sees it. Raises InputError where more than causality and packing decide who attends to whom.
    """
    if use_vmap or q_length != kv_length:
        raise InputError(
            "model.attention: varlen: in this model more than the order of tokens decides which attend to each other; "
            "use sdpa"
        )
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):
        raise InputError("model.attention: varlen: rows are padded on the left; use sdpa")
    device = options.get("device", "cpu")
    row = torch.arange(batch_size, device=device)[:, None]
    at = torch.arange(1, q_length, device=device)[None]
    joined = torch.as_tensor(mask_function(row, 0, at, at - 1), device=device).expand(batch_size, q_length - 1)
    begins = functional.pad(~joined, (1, 0), value=True).flatten().nonzero().flatten()
    return functional.pad(begins, (0, 1), value=batch_size * q_length)


def attention(
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
    """``query`` (batch, heads, length, size), ``key`` and ``value`` (batch, key heads, length, size), and of
    `beginnings` what it returned; returns (batch, length, heads, size). Raises InputError for what sdpa cannot do, and
    for attention that is not causal."""
    check_causal(module, options)
    if attention_mask is None or attention_mask.dim() != 1:
        raise InputError(_NOT_CAUSAL)
    length, bounds, rows = query.shape[2], attention_mask.tolist(), []
    for row in range(query.shape[0]):
        inside = [at for at in bounds if row * length <= at <= (row + 1) * length]
        rows.append([end - start for start, end in itertools.pairwise(inside)])
    return _attended(module, query, key, value, rows, dropout, scaling, sliding_window), None


_NOT_CAUSAL = "model.attention: varlen: an attention of this model is not causal; use sdpa"


def check_causal(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Raise InputError for an attention that is not causal, or changes its scores. ``options``: its arguments."""
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]:
        raise InputError(f"model.attention: varlen: this model's attention has {unknown[0]}; use eager")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise InputError(_NOT_CAUSAL)


def attention_of_whole_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As ``attention`` of rows that are one sample each, whatever the mask."""
    rows = [[query.shape[2]]] * query.shape[0]
    return _attended(module, query, key, value, rows, dropout, scaling, None), None


def _attended(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Sequence[Sequence[int]],
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """(batch, length, heads, size). ``rows``: of each, the lengths of its samples."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: list[torch.Tensor] = []
    for sizes, *tensors in zip(rows, query, key, value, strict=True):
        # Neighbours of one length are one call: padding is samples of one token.
        runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
        parts = (one.split([size * count for size, count in runs], dim=1) for one in tensors)
        for (size, count), parted in zip(runs, zip(*parts, strict=True), strict=True):
            band = _band(size, window, query.device)
            own = (one.unflatten(1, (count, size)).transpose(0, 1) for one in parted)
            output, _ = sdpa_attention_forward(module, *own, band, dropout, scaling, is_causal=band is None)
            found.append(output.flatten(0, 1))
    return torch.cat(found).view(query.shape[0], query.shape[2], *found[0].shape[1:])


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which of a sample's tokens see which (1, 1, length, length), where ``window`` limits it; None where it does
    not."""
    if window is None or length <= window:
        return None
    apart = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return ((apart >= 0) & (apart < window))[None, None]
