"""Traces a part of rows whose tokens are divided over ranks, or a part of layers: exchanges and sums between the ranks
without ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.model import context
from toolkit.model.experts import ExpertRanks
from toolkit.model.tensor import Ranks
from toolkit.upstream.transformers import attention_of

_ON_BYTES: ContextVar[Callable[[int], None] | None] = ContextVar("on_bytes", default=None)


@dataclass(frozen=True)
class _Group:
    """In place of a process group."""

    count: int

    def size(self) -> int:
        return self.count


def acted_ranks(count: int) -> Ranks:
    """In place of the ranks of divided layers, as the first of them."""

    def add_up(tensor: torch.Tensor) -> None:
        if (on_bytes := _ON_BYTES.get()) is not None:
            on_bytes(tensor.numel() * tensor.element_size())

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        if (on_bytes := _ON_BYTES.get()) is not None:  # all parts, around the ring once and not twice
            on_bytes(tensor.numel() * tensor.element_size() * count // 2)
        return [tensor] * count

    return Ranks(count, 0, add_up, gather)


def acted_experts(count: int) -> ExpertRanks:
    """In place of the ranks of divided experts, as the first of them. Every rank's experts are chosen as often, so
    that it takes as many rows as it gives; both are there at once."""

    def sizes(owner: torch.Tensor) -> tuple[list[int], list[int]]:
        return [owner.numel()], [owner.numel()]

    def move(rows: torch.Tensor, given: Sequence[int], taken: Sequence[int]) -> torch.Tensor:
        if (on_bytes := _ON_BYTES.get()) is not None:
            on_bytes(rows.numel() * rows.element_size())
        return torch.empty_like(rows).copy_(rows)

    return ExpertRanks(count, 0, sizes, move)


@contextlib.contextmanager
def counting_sums(on_bytes: Callable[[int], None]) -> Iterator[None]:
    """Inside, ``on_bytes`` is called with the bytes of everything that the ranks of divided layers add up, and of all
    rows that a rank of divided experts gives."""
    token = _ON_BYTES.set(on_bytes)
    try:
        yield
    finally:
        _ON_BYTES.reset(token)


@contextlib.contextmanager
def acted_parts(model: Any, count: int, masked: bool, on_bytes: Callable[[int], None]) -> Iterator[None]:
    """Inside, ``model`` computes a part of each row as one of ``count`` ranks does: what an exchange sends and what it
    receives have the same size, and both are there at once. ``masked``: rows hold several samples. ``on_bytes``: called
    with the bytes of each exchange."""
    if count == 1:
        yield
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = attention_of(base.config) or "sdpa"
    right = context.all_to_all, context.several_samples, dict(context._GROUPS)
    group: Any = _Group(count)
    context._GROUPS[count] = group

    def all_to_all(sent: torch.Tensor, group: Any) -> torch.Tensor:
        on_bytes(sent.numel() * sent.element_size())
        return torch.empty_like(sent).copy_(sent)

    context.all_to_all = all_to_all
    context.several_samples = lambda samples: masked
    context.attend_in_parts(base)
    try:
        yield
    finally:
        base.set_attn_implementation(own)
        context.all_to_all, context.several_samples, kept = right
        context._GROUPS.clear()
        context._GROUPS.update(kept)
