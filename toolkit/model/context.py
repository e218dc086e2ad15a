"""Attention over rows whose tokens are divided over ranks: Ulysses (Jacobs et al., arXiv:2309.14509).

Each rank computes everything but attention for its own tokens. In each attention the ranks exchange: from all heads of
their own tokens to all tokens of their own heads, and back. transformers' sdpa computes in between, so kernels,
dropout and masks are those of a whole row. Where fewer key heads than ranks would leave a rank without one, key heads
are repeated first, as sdpa would repeat them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.errors import RunFailed
from toolkit.model.tensor import group_of
from toolkit.recipe.mesh import RowPart
from toolkit.recipe.resolve import Resolved
from toolkit.tasks.labels import IGNORED

NAME = "toolkit_ulysses"


class _Row:
    """The forward that runs: the rows' positions where they are packed, whether they have padding, and how many layers
    have exchanged."""

    def __init__(self, positions: torch.Tensor | None, padded: bool) -> None:
        self.positions, self.padded, self.exchanges = positions, padded, 0


_ROW: ContextVar[_Row | None] = ContextVar("row", default=None)
_GROUPS: dict[int, dist.ProcessGroup] = {}
"""By size the group of ranks that divide rows with this process, of the model that was divided last."""


def divide_rows(model: Any, resolved: Resolved) -> None:
    """Make the attention of ``model`` exchange over the ranks of ``strategy.mesh.context``. Every process calls it."""
    _GROUPS[resolved.mesh.context] = group_of(resolved, resolved.mesh.context_ranks, "rows")
    attend_in_parts(model)


def attend_in_parts(model: Any) -> None:
    """Let a transformers model, with an adapter or without, use ``attention`` and ``mask``; where rows are whole, these
    are transformers' sdpa."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(NAME)


@contextlib.contextmanager
def part_of_rows(
    inputs: Mapping[str, torch.Tensor], labels: torch.Tensor, part: RowPart | None
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """What the model computes of whole rows on this rank: its ``inputs`` (batch, length / parts), and ``labels``
    (batch, length / parts + 1), whose last is the next part's first. Forwards run inside.

    Raises RunFailed if no layer has exchanged, or one attends without a mask: then to this rank's tokens alone.
    """
    if part is None:
        yield dict(inputs), labels
        return
    own = part.tokens(labels.shape[1])
    row = _Row(inputs.get("position_ids"), inputs.get("attention_mask") is not None)
    token = _ROW.set(row)
    try:
        yield _inputs(inputs, labels, own), _labels(labels, own)
    finally:
        _ROW.reset(token)
    if not row.exchanges:
        raise RunFailed(
            "strategy.mesh.context: no attention layer exchanged its tokens with the other ranks; this model does not "
            "use transformers' attention interface"
        )


def _inputs(inputs: Mapping[str, torch.Tensor], labels: torch.Tensor, own: range) -> dict[str, torch.Tensor]:
    positions = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    # The mask is of the whole row. With one, transformers does not look for packed samples in the positions, of which
    # it has a part alone; ``mask`` does, in all of them.
    whole = inputs.get("attention_mask")
    return {
        "input_ids": inputs["input_ids"][:, own.start : own.stop],
        "position_ids": positions[:, own.start : own.stop],
        "attention_mask": torch.ones_like(labels) if whole is None else whole,
    }


def _labels(labels: torch.Tensor, own: range) -> torch.Tensor:
    return functional.pad(labels, (0, 1), value=IGNORED)[:, own.start : own.stop + 1]


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    **options: Any,
) -> torch.Tensor | None:
    """The mask of whole rows: (batch, 1, length, length), True where a token attends. An empty one (1, 1, 0, length)
    stands for a causal mask, which sdpa needs not be given. Outside of divided rows, sdpa's own.

    ``q_length``: tokens of this rank's part; ``kv_length``: of the row, the length of the given padding mask.
    """
    from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask

    row = _ROW.get()
    if row is None:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
    if not row.padded:
        options["attention_mask"] = None
    if row.positions is not None:
        samples = (row.positions == 0).cumsum(-1)  # each begins at 0, padding tokens too
        if several_samples(samples):
            inner = options.pop("mask_function", causal_mask_function)
            options["mask_function"] = and_masks(inner, lambda b, h, q, k: samples[b, q] == samples[b, k])
            options["allow_is_causal_skip"] = False
    found = sdpa_mask(batch_size, kv_length, kv_length, 0, 0, **options)
    device = options.get("device", "cpu")
    return torch.empty(1, 1, 0, kv_length, dtype=torch.bool, device=device) if found is None else found


def several_samples(samples: torch.Tensor) -> bool:
    """Whether a row has more than one sample; ``samples`` (batch, length) counts them from 1."""
    return bool((samples != 1).any())


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa over whole rows, of which every rank has a part.

    ``query`` (batch, heads, length, width), ``key`` and ``value`` (batch, key heads, length, width), of this rank's
    tokens; gives (batch, length, heads, width). Rows that are not divided have a mask no longer than the keys, or none.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    row = _ROW.get()
    if attention_mask is None or attention_mask.shape[-1] == key.shape[2]:
        if row is not None:
            raise RunFailed(
                f"strategy.mesh.context: {type(module).__name__} attends without the mask of whole rows, so to its own "
                "part of them alone; this model cannot be divided"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    count = attention_mask.shape[-1] // key.shape[2]
    if row is not None:  # none where a block is recomputed in the backward
        row.exchanges += 1
    group, heads = _GROUPS[count], query.shape[1]
    if key.shape[1] % count:
        repeats = heads // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    query, key, value = (_Exchange.apply(tensor, group, True) for tensor in (query, key, value))
    whole = attention_mask if attention_mask.shape[-2] else None
    alike = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1],
        is_causal=getattr(module, "is_causal", True),
        training=module.training,
    )
    output, _ = sdpa_attention_forward(alike, query, key, value, whole, **options)
    return _Exchange.apply(output.transpose(1, 2), group, False).transpose(1, 2).contiguous(), None


class _Exchange(torch.autograd.Function):
    """From (batch, heads, own length, width) to (batch, own heads, length, width), or back; its backward is the other
    one. Values move, nothing is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(outer[0], ctx.group, not ctx.to_heads), None, None


def all_to_all(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What every rank of ``group`` has sent to this one (ranks, …), from what this one sends to each (ranks, …)."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    count, (batch, heads, length, width) = group.size(), x.shape
    if to_heads:
        sent = x.reshape(batch, count, heads // count, length, width).transpose(0, 1).contiguous()
        received = all_to_all(sent, group)
        # (ranks, batch, own heads, their length, width): the ranks' tokens one after another
        return received.permute(1, 2, 0, 3, 4).reshape(batch, heads // count, count * length, width)
    sent = x.reshape(batch, heads, count, length // count, width).permute(2, 0, 1, 3, 4).contiguous()
    received = all_to_all(sent, group)
    return received.transpose(0, 1).reshape(batch, count * heads, length // count, width)
