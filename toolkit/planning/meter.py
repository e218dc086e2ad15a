"""Counts the work of a trace, operation by operation: floating-point operations, bytes read and written, kernels.

A kernel of an operation reads its operands and writes its result once: PyTorch runs one after another, and what a GPU's
caches keep is small beside an activation. Views are no kernels. Two operations are exceptions: of rows that are looked
up only those are read, and a causal flash kernel skips the half of the scores that it masks (arXiv:2307.08691, section
3.1.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from toolkit.model.operators import operator_name
from toolkit.planning.work import NUMBERS, Attention, Work

_ATTENTION = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
}
"""By an operator's name, which a version of torch need not have: where ``is_causal`` is among its arguments (torch
2.13.0, native_functions.yaml)."""
THIN = 128
"""Floating-point operations a byte below which a product is as slow as reading its operands: an adapter's, whose rank
is small. Rates by bandwidths of the devices' data sheets are 76 to 420."""
_NOTHING = {"_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
            "set_", "resize_"}  # fmt: skip
_LOOKS_UP = {"embedding", "index_select", "gather", "index", "nll_loss_forward"}
_WRITES = {"fill_", "zero_", "copy_", "bernoulli_", "normal_", "uniform_"}
"""In place, without reading what was there."""


_moved: list[Callable[[float], None]] = []


def kernel(*tensors: torch.Tensor, more: float = 0) -> None:
    """Count a kernel that reads or writes ``tensors`` and ``more`` bytes, for code that stands in for one in a
    trace."""
    for counted in _moved[-1:]:
        counted(more + sum(map(_size, tensors)))


class Meter:
    """Adds up the work of dispatched operations. Entered, it also hears `kernel`."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        self._attention: dict[Attention, float] = {}
        self._kinds: dict[Any, str] = {}

    def __enter__(self) -> Meter:
        _moved.append(self._unseen)
        return self

    def __exit__(self, *error: Any) -> None:
        _moved.pop()

    def taken(self) -> Work:
        """The work since the last call."""
        work = Work(**dict(zip(NUMBERS, self._sums, strict=True)), attention=self._attention)
        self._sums, self._attention = [0.0] * 5, {}
        return work

    def _unseen(self, size: float) -> None:
        self._sums[3] += size
        self._sums[4] += 1

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One dispatched operation."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind(func)
        if kind == "nothing":
            return
        sums = self._sums
        sums[4] += 1
        if kind == "attention":
            name = operator_name(func)
            place = _ATTENTION[name]
            causal = bool(args[place] if len(args) > place else kwargs.get("is_causal", False))
            length, width = args[0].shape[-2:]
            seen = Attention("flash" if "flash" in name else "efficient", "backward" in name, width, length, causal)
            count = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
            self._attention[seen] = self._attention.get(seen, 0.0) + (count / 2 if causal else count)
            sums[2] += _sizes(args) + _sizes(_results(result))
        elif kind == "product":
            count = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
            size = _sizes(args) + _sizes(_results(result))
            if count < THIN * size:
                sums[3] += size
            else:
                sums[1 if _results(result)[0].dtype == torch.float32 else 0] += count
                sums[2] += size
        elif kind == "lookup":
            sums[3] += 2 * _sizes(_results(result))
        else:
            sums[3] += _sizes(args[1:] if kind == "write" else args) + _sizes(_results(result))


def _kind(func: Any) -> str:
    name = operator_name(func)
    if name in _ATTENTION:
        return "attention"
    if func.overloadpacket in flop_registry:
        return "product"
    if func.is_view or func.namespace == "prim" or name in _NOTHING:
        return "nothing"
    return "lookup" if name in _LOOKS_UP else "write" if name in _WRITES else "kernel"


def _results(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for one in result if isinstance(one, torch.Tensor)] if isinstance(result, list | tuple) else []


def _sizes(values: Iterable[Any]) -> float:
    total = 0.0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += _size(value)
        elif isinstance(value, list | tuple):
            total += _sizes(value)
    return total


def _size(tensor: torch.Tensor) -> float:
    """Bytes: of a tensor that is expanded, those that exist."""
    size = tensor.numel() * tensor.element_size()
    return size if tensor.is_contiguous() else min(size, tensor.untyped_storage().nbytes())
