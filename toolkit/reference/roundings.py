"""The plain loop's blocks with other roundings: what a compiler is free to do.

It adds up in another order, multiplies and adds in one instruction, and has other approximations of exponentials: a
rounding of float32. 16-bit results are rounded where the plain block rounds them (``model/compiling.py`` sees to it):
of them only those move that lie that near to the middle between two numbers. Products of matrices are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

OTHER = 1 / 6
"""Share of float32 results that are moved to a neighbouring number. A rounding errs by at most half of the spacing
between numbers, with a variance of 1/12 of its square: that of moving every twelfth by one spacing. Both sides round,
independently: the variance is twice that of one rounding."""

_aten = torch.ops.aten
_EXACT = frozenset(
    {
        _aten.clone, _aten.cat, _aten.stack, _aten.embedding, _aten.index, _aten.index_select, _aten.gather,
        _aten.where, _aten.masked_fill, _aten.constant_pad_nd, _aten.repeat, _aten.select_backward,
        _aten.slice_backward, _aten.new_zeros, _aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.neg,
        _aten.relu, _aten.threshold_backward, _aten.abs, _aten.sign, _aten._to_copy,
    }
)  # fmt: skip
"""Operations that move values, or round them as both sides do."""
_PRODUCTS = frozenset(
    {
        _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm, _aten.convolution,
        _aten.convolution_backward,
    }
)  # fmt: skip


class _Moving(TorchDispatchMode):
    """``inside``: blocks whose forward is running. Only what is computed from hidden states is moved, not places or
    counts, which are floats on their way: a table of relative positions, the number of rows that an expert takes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        backward = torch._C._current_graph_task_id() != -1
        if not backward and not (self.inside and any(map(_is_computed, tensors))):
            return func(*args, **kwargs)
        aliases = any(one.alias_info is not None for one in func._schema.returns)  # a view, or written in place
        found = func(*args, **kwargs)
        if not aliases and packet not in _EXACT and tensors:
            found = tree_map_only(torch.Tensor, lambda one: self._otherwise(one, packet), found)
        tree_map_only(torch.Tensor, _mark, found)
        return found

    def _otherwise(self, values: torch.Tensor, packet: Any) -> torch.Tensor:
        """A result that is off by a rounding of float32."""
        if not values.is_floating_point():
            return values
        if not _is_short(values):
            return self._moved(values, OTHER)
        # It falls to another 16-bit number where it is that near to the middle between two.
        apart = torch.finfo(torch.float32).eps / torch.finfo(values.dtype).eps
        return values if packet in _PRODUCTS else self._moved(values, apart)

    def _moved(self, values: torch.Tensor, share: float) -> torch.Tensor:
        draw = torch.rand(values.shape, generator=self.draw).to(values.device)
        far = torch.full_like(values, torch.inf)
        higher, lower = torch.nextafter(values, far), torch.nextafter(values, -far)
        moved = torch.where(draw < share / 2, higher, torch.where(draw < share, lower, values))
        return torch.where(torch.isfinite(values) & (values != 0), moved, values)


def _is_computed(values: torch.Tensor) -> bool:
    return isinstance(values, nn.Parameter) or hasattr(values, "_computed")


def _mark(values: torch.Tensor) -> None:
    if values.is_floating_point():
        values._computed = True  # type: ignore[attr-defined]


def _is_short(values: torch.Tensor) -> bool:
    return values.dtype in (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def other_roundings(blocks: Sequence[nn.Module], seed: int) -> Iterator[None]:
    """Inside, what these blocks compute, and what every backward does, has other roundings, at random."""
    moving = _Moving(seed)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        moving.inside += 1
        tree_map_only(torch.Tensor, _mark, (args, kwargs))

    def leave(*_: Any) -> None:
        moving.inside -= 1

    handles = [block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave, always_call=True) for block in blocks]
    try:
        with moving:
            yield
    finally:
        for handle in handles:
            handle.remove()
