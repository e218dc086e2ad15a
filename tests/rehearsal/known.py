"""Values of small fake tensors that follow from the program alone: counts, sizes, masks, flags.

A fake tensor has a shape and no values. Most of what a host reads does not depend on weights, though: how many ranks
answered, how many tokens there are, whether a row is padded. Such a tensor carries its values beside it, computed on
the CPU from the same operators. What depends on weights has none, and is read as a finite number without an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

LIMIT = 2048
"""Elements above which no values are kept: rows of ids and masks of these tests have fewer."""

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
"""What has its own elements; others, as DTensor, hold such a tensor."""
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Taken for zeros, until something is written there."""
_UNKNOWN = frozenset({"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "bernoulli", "bernoulli_",
                      "normal_", "uniform_", "random_", "native_dropout", "set_", "resize_"})  # fmt: skip
_FINITE = {"isfinite": True, "isnan": False, "isinf": False}
_ALIKE = frozenset(
    {
        "logical_or",
        "bitwise_or",
        "logical_and",
        "bitwise_and",
        "mul",
        "logical_not",
        "bitwise_not",
        "_to_copy",
        "max",
        "any",
        "all",
    }
)
"""Asked of every element whether it is finite, and put together: no tensor is too large for that."""
_NO_OVERFLOW = "_amp_foreach_non_finite_check_and_unscale_"
_STAND_IN = {"equal": False}


class Known:
    """Keeps values beside fake tensors. Its methods are called where dispatch is off: values are real tensors."""

    def __init__(self) -> None:
        self._lost: set[StorageWeakRef] = set()
        """Storages of values that something unknown was written into: views of them are lost too."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of ``tensor``, on the CPU; None where they are not known."""
        if not isinstance(tensor, FakeTensor):
            real = type(tensor) in PLAIN and not tensor.is_meta
            return tensor if real and tensor.numel() <= LIMIT else None
        values = getattr(tensor, "_rehearsed", None)
        if values is None or values.shape != tensor.shape or values.dtype != tensor.dtype:
            return None
        return None if StorageWeakRef(values.untyped_storage()) in self._lost else values

    def set(self, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        if isinstance(tensor, FakeTensor):
            tensor._rehearsed = values  # type: ignore[attr-defined]

    def _set_alike(self, tensor: torch.Tensor, one: torch.Tensor) -> None:
        """Every element of ``tensor`` has the one value of ``one``, however many there are."""
        tensor._alike = one  # type: ignore[attr-defined]
        self.set(tensor, one.expand(tensor.shape).clone() if tensor.numel() <= LIMIT else None)

    def lose(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into ``tensor``."""
        values = getattr(tensor, "_rehearsed", None)
        if values is not None:
            self._lost = {storage for storage in self._lost if not storage.expired()}
            self._lost.add(StorageWeakRef(values.untyped_storage()))

    def follow(self, func: Any, args: Any, kwargs: Any, answer: Any) -> None:
        """Compute what ``func`` did to values, after it was run on the fake tensors."""
        name = func._schema.name.removeprefix("aten::")
        outputs = tensors_in((answer,))
        if (finite := _finite(name, args)) is not None:
            self._set_alike(answer, torch.full((1,) * answer.dim(), finite))
            return
        if name in _ALIKE and all(hasattr(t, "_alike") for t in tensors_in(args, kwargs)):
            one = lambda value: value._alike if isinstance(value, torch.Tensor) else self._real(value)  # noqa: E731
            self._set_alike(answer, func(*map(one, args), **{key: one(value) for key, value in kwargs.items()}))
            return
        if name == _NO_OVERFLOW:
            for gradient in args[0]:
                self.lose(gradient)
            return  # found_inf is what it was
        inputs = tensors_in(args, kwargs)
        small = outputs and all(t.numel() <= LIMIT for t in outputs)
        if not small or name in _UNKNOWN or any(self.of(t) is None for t in inputs):
            for tensor in written(func, args, kwargs):
                self.lose(tensor)
            return
        computed = self.compute(func, args, kwargs)
        if name in _EMPTY:
            computed.zero_()
        values = tensors_in((computed,))
        for output, value in zip(outputs, values, strict=True):
            if not any(output is tensor for tensor in inputs):
                self.set(output, value)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` of the values, all of which are known."""
        return func(*tree_map(self._real, args), **tree_map(self._real, kwargs))

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def read(self, func: Any, tensor: torch.Tensor) -> Any:
        """What the host reads of one element, or ``equal`` answers: its value, else one that stands for it."""
        name = func._schema.name.removeprefix("aten::")
        if name in _STAND_IN:
            return _STAND_IN[name]
        values = self.of(tensor)
        if values is not None:
            return values.item()
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 1


def _finite(name: str, args: Any) -> bool | None:
    """What an operator answers that asks whether numbers are finite, all of which are; None where it asks something
    else. ``isfinite`` comes as ``x == x`` and ``abs(x) != inf``."""
    if name in ("eq", "ne") and (args[0] is args[1] or _infinite(args[1])):
        return (name == "eq") == (args[0] is args[1])
    return _FINITE.get(name)


def _infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes into."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[at] if at < len(args) else kwargs.get(argument.name)
        yield from tensors_in((given,))


def tensors_in(args: Any, kwargs: Any = None) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, which are at most lists of lists of them."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int):
            found += tensors_in(value)
    return found


def device_of(tensor: torch.Tensor) -> torch.device:
    """A tensor's device, without asking through dispatch, which all of it passes."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
