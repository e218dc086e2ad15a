"""Rows whose tokens several ranks divide, in the plain loop.

What the plain loop computes of such a row is the row, in one piece. In 16 bits a product of some of its tokens rounds
otherwise than one of all, so it also has the candidate's order of operations: each part goes through a model of its
own, which shares the weights' memory, and the parts meet in attention, where each attends with some of the heads over
the whole row. Its gradient is that of the row, which float32 shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from toolkit.data.collate import MicroBatch
from toolkit.reference.meeting import Meeting

NAME = "plain_parts"

Mistake = Literal["", "positions", "edges", "alone", "keys", "masks", "order"]
"""What a run may do wrong with parts of rows, for diagnoses: positions that restart in each part; edges whose
prediction is lost; attention to the own part alone; key heads of another rank; the dropout masks of another part. With
experts: results in the order of ranks."""


@dataclass(frozen=True)
class _Here:
    """The part that this thread computes."""

    meeting: Meeting
    index: int
    count: int
    positions: torch.Tensor | None
    """Of whole rows that hold several samples."""
    mistake: Mistake = ""
    columns: int = 1
    """How many parts the heads are in by themselves (``columns.py``), each of which the parts of rows divide."""


_HERE: ContextVar[_Here | None] = ContextVar("here", default=None)


def joined(window: Sequence[tuple[int, MicroBatch]]) -> list[tuple[int, MicroBatch]]:
    """A window whose rows are not divided: (data-parallel rank, micro-batch) pairs."""
    found: list[tuple[int, MicroBatch]] = []
    for rank, micro in window:
        if micro.part is None:
            found.append((rank, micro))
        elif micro.part.index == 0:
            own, count = (rank // micro.part.count, micro.micro), micro.part.count
            supervised = sum(other.supervised for at, other in window if (at // count, other.micro) == own)
            found.append((own[0], replace(micro, part=None, supervised=supervised)))
    return found


def by_row(window: Sequence[tuple[int, MicroBatch]], losses: Sequence[float]) -> list[float]:
    """The losses of ``joined(window)``, from those of its parts."""
    sums: dict[tuple[int, int], float] = {}
    for (rank, micro), loss in zip(window, losses, strict=True):
        at = (rank // micro.part.count if micro.part else rank, micro.micro)
        sums[at] = sums.get(at, 0.0) + loss
    return list(sums.values())


@contextlib.contextmanager
def attending_in_parts(models: Sequence[Any]) -> Iterator[None]:
    """Inside, attention of ``models`` is over the whole row, wherever a thread computes a part of it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    bases = [model.get_base_model() if hasattr(model, "get_base_model") else model for model in models]
    for base in bases:
        base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        for base in bases:
            base.set_attn_implementation("sdpa")


@contextlib.contextmanager
def computing(meeting: Meeting, micro: MicroBatch, mistake: Mistake = "", columns: int = 1) -> Iterator[None]:
    """What the thread computes inside is the part of ``micro``."""
    assert micro.part is not None
    packed = micro.tensors["position_ids"] if "attention_mask" not in micro.tensors else None
    token = _HERE.set(_Here(meeting, micro.part.index, micro.part.count, packed, mistake, columns))
    try:
        yield
    finally:
        _HERE.reset(token)


def part_of(micro: MicroBatch, mistake: Mistake = "") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs for the part, and what each of its positions predicts (batch, length of the part)."""
    assert micro.part is not None
    ids, labels = micro.tensors["input_ids"], micro.tensors["labels"]
    length = ids.shape[1] // micro.part.count
    own = slice(micro.part.index * length, (micro.part.index + 1) * length)
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    inputs = {
        "input_ids": ids[:, own],
        "position_ids": micro.tensors.get("position_ids", places)[:, own],
        "attention_mask": micro.tensors.get("attention_mask", torch.ones_like(ids)),
    }
    if mistake == "positions":
        inputs["position_ids"] = inputs["position_ids"] - inputs["position_ids"][:, :1]
    following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    if mistake == "edges":
        following = following.clone()
        following[:, length - 1 :: length] = -100
    return inputs, following[:, own]


def _mask(batch_size: int, q_length: int, kv_length: int, *offsets: int, **options: Any) -> Any:
    """transformers' mask of the whole row, with a row for every token of it; None where sdpa's causal mask will do."""
    from transformers.masking_utils import sdpa_mask

    here = _HERE.get()
    assert here is not None
    options = {key: value for key, value in options.items() if key not in ("q_offset", "kv_offset")}
    positions = here.positions
    starts = None if positions is None else (positions == 0).long().cumsum(1)
    if starts is not None and int(starts.max()) > 1:
        within = options["mask_function"]

        def of_one_sample(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return within(batch, head, query, key) & (starts[batch, query] == starts[batch, key])

        options |= {"mask_function": of_one_sample, "allow_is_causal_skip": False}
    return sdpa_mask(batch_size, kv_length, kv_length, **options)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    here = _HERE.get()
    assert here is not None
    if here.mistake == "alone":
        return sdpa_attention_forward(module, query, key, value, None, **options)
    if here.columns > 1:
        alone = replace(here, columns=1)
        parts = zip(*(tensor.chunk(here.columns, dim=1) for tensor in (query, key, value)), strict=True)
        outputs = []
        for q, k, v in parts:
            token = _HERE.set(alone)
            try:
                outputs.append(_attention(module, q, k, v, attention_mask, **options)[0])
            finally:
                _HERE.reset(token)
        return torch.cat(outputs, dim=2), None
    if key.shape[1] % here.count:
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)

    def whole_rows(brought: list[Any]) -> list[Any]:
        rows = [torch.cat([one[which] for one in brought], dim=2) for which in range(3)]
        if here.mistake == "keys":
            turn = rows[1].shape[1] // here.count
            rows[1:] = [row.roll(turn, dims=1) for row in rows[1:]]
        return [[row.chunk(here.count, dim=1)[index] for row in rows] for index in range(here.count)]

    def own_tokens(brought: list[Any]) -> list[Any]:
        return list(torch.cat(brought, dim=2).chunk(here.count, dim=1))

    query, key, value = here.meeting.meet(here.index, (query, key, value), whole_rows)
    heads = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    output, _ = sdpa_attention_forward(heads, query, key, value, attention_mask, **options)
    return here.meeting.meet(here.index, output, own_tokens).contiguous(), None
