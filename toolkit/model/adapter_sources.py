"""An adapter on a base that is loaded by part: it is drawn as on one with values, if it does not read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from toolkit.model.sources import NotByPart, Source, give, set_values, source_of, sources, stand_in
from toolkit.trees import leaves
from toolkit.upstream.torch import DispatchMode, sees_operators

_VIEWS = {"aten::detach", "aten::alias"}
_COPIES = {"aten::clone", "aten::_to_copy"}
"""Operators by name: one that is not there in a version of torch needs no case of its own."""


class _Watch(DispatchMode):
    """Knows stand-ins and their copies by the storage they are in, and the first operation that uses values of one."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: str | None = None
        self._known: dict[int, tuple[Source, torch.Tensor]] = {}

    def know(self, tensor: torch.Tensor, source: Source) -> None:
        # Holding the tensor: for as long its storage has one Python object (torch since 2.1), and no other its number.
        self._known[id(tensor.untyped_storage())] = source, tensor

    def source_of(self, tensor: torch.Tensor) -> Source | None:
        known = None if tensor.is_meta else self._known.get(id(tensor.untyped_storage()))
        if known is None:
            return None
        if known[1].shape != tensor.shape:
            self.problem = self.problem or "a part of a weight"
        return known[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.name() in _VIEWS or not any(self.source_of(tensor) for tensor in used):
            return func(*args, **kwargs)
        if func.name() in _COPIES:
            copy = stand_in(torch.empty_like(used[0], dtype=kwargs.get("dtype"), device="meta"))
            self.know(copy, self.source_of(used[0]))  # type: ignore[arg-type]
            return copy
        self.problem = self.problem or str(func)
        return func(*args, **kwargs)


@contextlib.contextmanager
def adding(model: nn.Module, adapted: list[Any], overwritten: bool = False) -> Iterator[None]:
    """Context in which PEFT adds an adapter to ``model``; put the adapted model in the list.

    PEFT puts what it draws on the device of the base, so parameters without memory are on the CPU meanwhile. Raises
    NotByPart if PEFT used their values. ``overwritten``: what trains gets other values afterwards, so that PEFT may use
    them for that alone (DoRA's magnitudes).
    """
    if not sees_operators():
        raise NotByPart("this torch does not show what an adapter reads")
    watch = _Watch()
    base, buffers = [], {id(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        if (source := source_of(parameter)) is not None:
            values = stand_in(parameter)
            watch.know(values, source)
            set_values(parameter, values)
            base.append(parameter)
    with watch:
        yield
    for parameter in adapted[0].parameters():
        if (source := watch.source_of(parameter)) is not None:
            set_values(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
            give(parameter, source)
    if any(watch.source_of(buffer) is not None for buffer in adapted[0].buffers()):
        watch.problem = watch.problem or "a copy of a weight"
    if watch.problem is not None and overwritten:
        trains = all(p.requires_grad for p in adapted[0].parameters() if source_of(p) is None)
        kept = all(source_of(parameter) is not None for parameter in base)
        if trains and kept and all(id(buffer) in buffers for buffer in adapted[0].buffers()):
            watch.problem = None
    if watch.problem is not None:
        raise NotByPart(f"its adapter starts from values of the base ({watch.problem})")
    sources(adapted[0])
