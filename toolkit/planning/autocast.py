"""Emulates torch.autocast("cuda") for tensors without memory, in Python.

Autocast does not apply to meta tensors, and fake tensors, to which it applies, are four times slower. The casts, and
the cache of cast weights that lives as long as the outermost region, are those of aten/src/ATen/autocast_mode.cpp; the
functions are those of «Autocast Op Reference» (PyTorch docs) that models call. ``check`` detects products that are not
covered, and the trace is repeated with fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

# Tensor products, which autocast runs in 16 bits; attention is in toolkit/planning/target.py.
_PRODUCTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (functional, ("linear", "bilinear", "conv1d", "conv2d", "conv3d")),
    (torch, ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm", "einsum", "conv1d", "conv2d")),
    (torch.Tensor, ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "__matmul__", "__rmatmul__")),
)
_aten = torch.ops.aten
_MUST_BE_HALF = frozenset({_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.convolution})


class NotActedOut(Exception):
    """A product ran in float32 that autocast would have run in 16 bits."""


class ActedAutocast:
    """Entered around a trace on meta tensors; acts where ``torch.is_autocast_enabled("cpu")``."""

    def __init__(self) -> None:
        self._cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, names in _PRODUCTS:
                for name in names:
                    _replace(stack, owner, name, self._in_half(getattr(owner, name)))
            _replace(stack, torch, "clear_autocast_cache", self._clearing(torch.clear_autocast_cache))
            _disable_where_models_do(stack)
            try:
                yield
            finally:
                self._cast_weights.clear()

    def check(self, func: Any, args: Any) -> None:
        """An operation that was dispatched; raises NotActedOut where autocast would have cast its arguments."""
        if func.overloadpacket in _MUST_BE_HALF and torch.is_autocast_enabled("cpu"):
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.dtype == torch.float32:
                    raise NotActedOut(str(func))

    def _in_half(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cpu")
                # Last argument first, as PyTorch's builds do: autograd frees the casts' gradients in this order.
                args = tuple([self._cast(value, dtype) for value in args[::-1]][::-1])
                kwargs = {key: self._cast(value, dtype) for key, value in kwargs.items()}
            return function(*args, **kwargs)

        return called

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(item, dtype) for item in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64):
            return value
        # cached_cast: leaves that train and are no views are cast once. Of activations checkpoints make views.
        if not (value.dtype == torch.float32 and value.requires_grad and isinstance(value, torch.nn.Parameter)):
            return value.to(dtype)
        known = self._cast_weights.get(id(value))
        if known is None:
            known = self._cast_weights[id(value)] = (value, value.to(dtype))
        return known[1]

    def _clearing(self, clear: Callable[[], None]) -> Callable[[], None]:
        """torch.autocast calls it when the outermost region ends."""

        def called() -> None:
            self._cast_weights.clear()
            clear()

        return called


def _disable_where_models_do(stack: contextlib.ExitStack) -> None:
    """transformers' ``maybe_autocast(device, enabled=False)`` does nothing on meta tensors; rotary tables, say, are
    made in float32 under it."""
    from transformers.utils import generic

    _replace(stack, generic, "nullcontext", lambda: torch.autocast("cpu", enabled=False))


@contextlib.contextmanager
def autocast_of_any_device() -> Iterator[None]:
    """torch knows no autocast for meta tensors, and PEFT 0.21 asks for one by the device of the experts' weights."""
    autocast = torch.autocast

    def entered(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
        return autocast("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        _replace(stack, torch, "autocast", entered)
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    own = vars(owner).get(name)
    setattr(owner, name, value)
    # A method of the class above is uncovered again by taking this one away.
    stack.callback(delattr, owner, name) if own is None else stack.callback(setattr, owner, name, own)
