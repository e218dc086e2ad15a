"""Random weights of a model from a config, without keeping them: each is drawn again when it is filled.

The model is made on the meta device by transformers' own code, and every operation on tensors without memory is noted.
Random ones are also performed once, in memory that is used again, so that the generator has the same state before each
as where the whole model is drawn: the same numbers, whatever the number of processes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from toolkit.machine import give_back_memory
from toolkit.model.operators import schema_of
from toolkit.model.sources import TRIMMED, Made, NotByPart, give, sources
from toolkit.trees import leaves, mapped
from toolkit.upstream.torch import DispatchMode, drawing_truncated, sees_operators

_OVERWRITES = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default, torch.ops.aten.zero_.default,
               torch.ops.aten.fill_.Scalar}  # fmt: skip
"""What a tensor had before does not matter where all of it is set."""
_ALIGNMENT = 64
"""Bytes: torch's own of memory on the CPU (c10/core/alignment.h, 2.13.0)."""


@dataclass(frozen=True)
class _Place:
    """A tensor without memory: where it is in its storage. (The tensor itself is not held: parameters are swapped.)"""

    storage: int
    bytes: int
    """Of the storage."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Noted:
    """An operation, with places for tensors. ``state``: of the generator before it, if it is random."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    result: Any
    state: torch.Tensor | None

    def reads(self) -> list[_Place]:
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, _Place)]

    def overwrites(self) -> bool:
        """Whether it sets all of its first argument's storage."""
        [first, *_] = self.args or [None]
        return self.func in _OVERWRITES and math.prod(first.size) * first.dtype.itemsize == first.bytes


class Log(DispatchMode):
    """The operations on tensors without memory, by the storages that they set."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[_Noted] = []
        self._setting: dict[int, list[int]] = defaultdict(list)
        self._storages: list[Any] = []
        """Held, so that no other one gets the same number."""
        self.scratch = _Scratch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _empty((args, kwargs, result)):
            random = torch.Tag.nondeterministic_seeded in func.tags
            self.note(func, args, kwargs, result, _mutated(func, args, kwargs), random)
        return result

    def note(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, written: list[torch.Tensor], random: bool
    ) -> None:
        """Note what a function did with tensors without memory; ``written``: arguments that it set. A random one is
        performed in other memory. Raises NotByPart where a tensor has values that no operation made."""
        state = None
        if random:
            if kwargs.get("generator") is not None:
                raise NotByPart("its code draws from a generator of its own")
            state = torch.get_rng_state()
            self.scratch.perform(func, args, kwargs)
        if any(_storage(tensor) not in self._setting for tensor in _empty((args, kwargs))):
            raise NotByPart("its code makes weights out of values that are not noted")
        for tensor in [*_empty(result), *written]:
            storage = _storage(tensor)
            self._storages.append(tensor.untyped_storage())
            if self._setting[storage][-1:] != [len(self._noted)]:
                self._setting[storage].append(len(self._noted))
        places = (mapped(_place, values) for values in (args, kwargs, result))
        self._noted.append(_Noted(func, *places, state))  # type: ignore[call-arg]

    def make(self, place: _Place) -> torch.Tensor:
        """The values of a tensor without memory, in memory of their own."""
        memory: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for number in sorted(self._needed(place.storage, len(self._noted), set())):
                noted = self._noted[number]
                real = partial(_real, memory)
                args, kwargs = mapped(real, noted.args), mapped(real, noted.kwargs)
                if noted.state is not None:
                    torch.set_rng_state(noted.state)
                result = noted.func(*args, **kwargs)
                for empty, values in zip(leaves(noted.result), leaves(result), strict=True):
                    if isinstance(empty, _Place) and empty.storage not in memory:
                        if empty.stride != values.stride() or values.storage_offset():
                            values = torch.empty_strided(empty.size, empty.stride, dtype=empty.dtype).copy_(values)
                        memory[empty.storage] = values.untyped_storage()
            made: torch.Tensor = _real(memory, place)
        return made

    def _needed(self, storage: int, before: int, found: set[int]) -> set[int]:
        """Numbers of the operations that what is in a storage before one of them depends on."""
        for number in reversed([number for number in self._setting[storage] if number < before]):
            if number in found:
                continue
            found.add(number)
            noted = self._noted[number]
            for place in noted.reads():
                if place.storage != storage:
                    self._needed(place.storage, number, found)
            if noted.overwrites():
                break
        return found


def _empty(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_meta]


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())  # one Python object for as long as it lives (torch since 2.1)


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that an operation writes to."""
    found = []
    for at, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[at] if at < len(args) else kwargs.get(argument.name))
    return _empty(found)


class _Scratch:
    """Memory in which random operations are performed whose values nobody needs: one block for all of them.

    With a block for each, glibc's heap grows by the whole model: of one that is freed, the next small tensor that is
    kept (a generator's state, 5 KB) takes the beginning, the next weight no longer fits, and its pages stay.
    """

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        self._held = torch.UntypedStorage(0)

    def perform(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Call ``func`` with zeros for tensors that have no memory, and the CPU for the meta device."""
        bytes_of = {id(tensor): _aligned(_extent(tensor)) for tensor in _empty((args, kwargs))}
        needed = sum(bytes_of.values())
        if needed > self._held.nbytes():
            self.release()
            self._held = torch.UntypedStorage(needed)
        starts = dict(zip(bytes_of, itertools.accumulate(bytes_of.values(), initial=0), strict=False))

        def zeros(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.is_meta):
                return _on_host(value)
            made = torch.empty(0, dtype=value.dtype)
            start = starts[id(value)] // value.dtype.itemsize
            return made.set_(self._held, start, value.size(), value.stride()).zero_()

        result = func(*mapped(zeros, args), **mapped(zeros, kwargs))
        made = sum(leaf.nbytes for leaf in leaves(result) if isinstance(leaf, torch.Tensor))
        del result
        if max(needed, made) >= TRIMMED:
            give_back_memory()  # of what it returned or needed itself


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _place(value: Any) -> Any:
    if not (isinstance(value, torch.Tensor) and value.is_meta):
        return value
    storage = value.untyped_storage()
    size, stride = tuple(value.size()), value.stride()
    return _Place(id(storage), storage.nbytes(), int(value.storage_offset()), size, stride, value.dtype)


def _real(memory: dict[int, torch.UntypedStorage], value: Any) -> Any:
    """A tensor without memory as it is in ``memory`` now."""
    if not isinstance(value, _Place):
        return _on_host(value)
    held = memory.get(value.storage)
    if held is None:
        held = memory[value.storage] = torch.UntypedStorage(value.bytes)
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(held, value.offset, value.size, value.stride)


class _AsOnHost(TorchFunctionMode):
    """Tensors without memory say that they are on the CPU: initialisations skip the meta device without a word. Those
    made out of Python's numbers have memory: they would lose their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func is torch.Tensor.device.__get__:
            return _on_host(func(*args, **kwargs))
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)


def _truncated(log: Log) -> Any:
    """torch's ``trunc_normal_`` does nothing without memory (2.13.0), and it draws until all values are within its
    bounds: noted as one operation."""
    name = drawing_truncated()
    draw = getattr(torch.nn.init, name)

    def on_host(*args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return draw(*args, **kwargs)

    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.untyped_storage().device.type == "meta":  # the tensor itself says that it is on the CPU
            log.note(on_host, (tensor, *args), kwargs, tensor, [tensor], random=True)
            return tensor
        return draw(tensor, *args, **kwargs)

    return mock.patch.object(torch.nn.init, name, wrapped)


@contextlib.contextmanager
def drawn(dtype: torch.dtype) -> Iterator[list[Any]]:
    """Context in which a model is made from a config without its random weights; put it in the list.

    Its parameters then have sources of ``dtype``, its buffers their values. Raises NotByPart if its code needs values
    of weights.
    """
    from transformers import modeling_utils
    from transformers.initialization import meta_device_safe_creation_ops

    if not (sees_operators() and drawing_truncated()):
        raise NotByPart("this torch does not show what is drawn")
    log, made = Log(), list[Any]()
    # transformers 5.23.0 draws nothing if its answer is the meta device (``init_weights``).
    drawing = mock.patch.object(modeling_utils, "get_torch_context_manager_or_global_device", return_value=None)
    try:
        with drawing, torch.device("meta"), meta_device_safe_creation_ops(), _AsOnHost(), _truncated(log), log:
            yield made
    except (RuntimeError, NotImplementedError) as error:
        raise NotByPart(f"its code computes with weights while they are made ({type(error).__name__})") from None
    log.scratch.release()
    for module in made[0].modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, log.make(_place(buffer)))
    for parameter in made[0].parameters():
        if parameter.is_meta:
            give(parameter, Made(partial(log.make, _place(parameter)), dtype))
    sources(made[0])
