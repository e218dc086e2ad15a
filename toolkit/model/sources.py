"""Where the values of a parameter without memory come from: each process reads the elements that it will keep.

A parameter on the meta device has its source as an attribute. Engines shard the parameters, then ``fill`` the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from toolkit.machine import READ_AT_ONCE, give_back_memory
from toolkit.model.stored import Stored

TRIMMED = 2**20
"""Bytes of a shard, or of what is made for it, from which on it matters what that leaves behind."""
_ATTRIBUTE = "_toolkit_source"


class NotByPart(Exception):
    """Why a model cannot be loaded by part. It is loaded whole then."""


class Source(Protocol):
    """The values of one tensor, in the dtype that the model is loaded in."""

    def fill(self, into: torch.Tensor, start: int) -> None:
        """Set a flat tensor, on any device, to the elements of the flattened tensor from ``start`` on."""

    def whole(self) -> torch.Tensor:
        """All of it, on the CPU, in its shape."""


@dataclass(frozen=True)
class Cast:
    """A tensor of a file in another dtype."""

    stored: Stored
    dtype: torch.dtype

    def fill(self, into: torch.Tensor, start: int) -> None:
        for at in range(0, into.numel(), READ_AT_ONCE):
            part = into[at : at + READ_AT_ONCE]
            part.copy_(self.stored.read(start + at, start + at + part.numel()).to(self.dtype))

    def whole(self) -> torch.Tensor:
        return self.stored.read(0, self.stored.numel).to(self.dtype).view(self.stored.shape)

    def exact_in(self, dtype: torch.dtype) -> bool:
        """Whether ``dtype`` holds what the file holds."""
        return self.stored.dtype == dtype


@dataclass(frozen=True)
class Made:
    """A tensor that is made whole each time, out of several or by drawing it. ``dtype``: floating values that are asked
    for are cast to it."""

    make: Callable[[], torch.Tensor]
    dtype: torch.dtype | None = None

    def fill(self, into: torch.Tensor, start: int) -> None:
        if not into.numel():
            return
        made = self.make().reshape(-1)
        large = made.nbytes >= TRIMMED
        for at in range(0, into.numel(), READ_AT_ONCE):
            part = into[at : at + READ_AT_ONCE]
            part.copy_(self._cast(made[start + at : start + at + part.numel()]))
        del made
        if large:
            give_back_memory()

    def whole(self) -> torch.Tensor:
        return self._cast(self.make())

    def _cast(self, made: torch.Tensor) -> torch.Tensor:
        return made if self.dtype is None or not made.is_floating_point() else made.to(self.dtype)


def give(parameter: torch.Tensor, source: Source) -> None:
    """Say where the values of a parameter without memory come from."""
    setattr(parameter, _ATTRIBUTE, source)


def source_of(parameter: torch.Tensor) -> Source | None:
    """None if it has its values itself."""
    return getattr(parameter, _ATTRIBUTE, None) if parameter.is_meta else None


def sources(model: nn.Module) -> dict[str, Source]:
    """The sources of a model's parameters by name, tied ones once. Raises NotByPart for a tensor that has neither
    values nor a source."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise NotByPart(f"{name} has no values and no source")
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            if (source := source_of(parameter)) is None:
                raise NotByPart(f"{name} has no values and no source")
            found[name] = source
    return found


def fill(into: torch.Tensor, source: Source, start: int) -> None:
    """Set a shard, flat, to the elements of the flattened tensor from ``start`` on, and give the memory that this took
    back to the system: shards that stay between buffers that went make glibc keep up to a third of a model."""
    source.fill(into, start)
    if into.numel() * into.element_size() >= TRIMMED:
        give_back_memory()


def set_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter without memory these values; all who hold it have them. (``parameter.data`` cannot be moved from
    the meta device.)"""
    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))


def fill_model(model: nn.Module) -> None:
    """Give every parameter of a model its values, on the CPU, one after another."""
    for parameter in model.parameters():
        if (source := source_of(parameter)) is not None:
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            fill(values.view(-1), source, 0)
            set_values(parameter, values)


def has_sources(model: nn.Module) -> bool:
    """Whether a model is loaded by part. One on the meta device without sources, as a plan has it, is not."""
    return any(source_of(parameter) is not None for parameter in model.parameters())


def stand_in(like: torch.Tensor, device: Any = "cpu") -> torch.Tensor:
    """Zeros of a tensor's shape and dtype that take the memory of one element."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
