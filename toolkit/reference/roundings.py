"""The plain loop's blocks with other roundings: what a compiler is free to do.

It adds up in another order, multiplies and adds in one instruction, and has other approximations of exponentials: a
rounding of float32. 16-bit results are rounded where the plain block rounds them (``model/compiling.py`` sees to it):
of them only those move that lie that near to the middle between two numbers. Products of matrices are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from toolkit.model.operators import operator_name, schema_of
from toolkit.trees import leaves, mapped
from toolkit.upstream.torch import DispatchMode, sees_operators

OTHER = 1 / 6
"""Share of float32 results that are moved to a neighbouring number. A rounding errs by at most half of the spacing
between numbers, with a variance of 1/12 of its square: that of moving every twelfth by one spacing. Both sides round,
independently: the variance is twice that of one rounding."""

_EXACT = frozenset(
    {
        "clone", "cat", "stack", "embedding", "index", "index_select", "gather", "where", "masked_fill",
        "constant_pad_nd", "repeat", "select_backward", "slice_backward", "new_zeros", "zeros_like", "ones_like",
        "empty_like", "neg", "relu", "threshold_backward", "abs", "sign", "_to_copy",
    }
)  # fmt: skip
"""Operations, by name, that move values, or round them as both sides do."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward"})


class _Moving(DispatchMode):
    """``inside``: blocks whose forward is running. Only what is computed from hidden states is moved, not places or
    counts, which are floats on their way: a table of relative positions, the number of rows that an expert takes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)
        self.inside = 0
        self.backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, operator = kwargs or {}, operator_name(func)
        tensors = [one for one in leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not self.backward and not (self.inside and any(map(_is_computed, tensors))):
            return func(*args, **kwargs)
        aliases = any(one.alias_info is not None for one in schema_of(func).returns)  # a view, or written in place
        found = func(*args, **kwargs)
        if not aliases and operator not in _EXACT and tensors:
            found = mapped(lambda one: self._otherwise(one, operator) if isinstance(one, torch.Tensor) else one, found)
        _mark(found)
        return found

    def _otherwise(self, values: torch.Tensor, operator: str) -> torch.Tensor:
        """A result that is off by a rounding of float32."""
        if not values.is_floating_point():
            return values
        if not _is_short(values):
            return self._moved(values, OTHER)
        # It falls to another 16-bit number where it is that near to the middle between two.
        apart = torch.finfo(torch.float32).eps / torch.finfo(values.dtype).eps
        return values if operator in _PRODUCTS else self._moved(values, apart)

    def _moved(self, values: torch.Tensor, share: float) -> torch.Tensor:
        draw = torch.rand(values.shape, generator=self.draw).to(values.device)
        far = torch.full_like(values, torch.inf)
        higher, lower = torch.nextafter(values, far), torch.nextafter(values, -far)
        moved = torch.where(draw < share / 2, higher, torch.where(draw < share, lower, values))
        return torch.where(torch.isfinite(values) & (values != 0), moved, values)


def _is_computed(values: torch.Tensor) -> bool:
    return isinstance(values, nn.Parameter) or hasattr(values, "computed_in_a_block")


def _mark(values: Any) -> None:
    for one in leaves(values):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            one.computed_in_a_block = True  # type: ignore[attr-defined]


def _is_short(values: torch.Tensor) -> bool:
    return values.dtype in (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def other_roundings(blocks: Sequence[nn.Module], seed: int) -> Iterator[None]:
    """Inside, what these blocks compute, and what every backward does, has other roundings, at random."""
    if not sees_operators():
        yield
        return
    moving = _Moving(seed)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        moving.inside += 1
        _mark((args, kwargs))

    def leave(*_: Any) -> None:
        moving.inside -= 1

    right = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        moving.backward = True
        try:
            right(*args, **kwargs)
        finally:
            moving.backward = False

    handles = [block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave, always_call=True) for block in blocks]
    try:
        with mock.patch.object(torch.autograd, "backward", backward), moving:
            yield
    finally:
        for handle in handles:
            handle.remove()
