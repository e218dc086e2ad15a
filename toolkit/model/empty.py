"""Weights that have a dtype and a place where tensors are made now, and no values; and a forward without them, in which
what depends on no weight is computed all the same."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from toolkit.model.packed_layers import PackedLayer
from toolkit.recipe.resolve import Precision
from toolkit.trees import leaves
from toolkit.upstream.torch import DispatchMode, fake_mode, is_fake, modes_off


@contextlib.contextmanager
def shapes_alone(meta: bool = False) -> Iterator[None]:
    """Tensors made here have no values: torch's fake ones, or ``meta`` ones. Of an operation that fails torch logs the
    whole stack, whose end is in the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, world = log.level, torch.device("meta") if meta else fake_mode()
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), world:
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def empty_weights(model: nn.Module, precision: Precision, autocast: bool) -> Iterator[nn.Module]:
    """The model with weights of the dtypes that a strategy computes with, made where tensors are made now."""
    kept: list[tuple[nn.Module, str, Any]] = []
    made: dict[int, nn.Parameter] = {}
    unpacking: list[tuple[PackedLayer, Any]] = []
    compute, trained, frozen, vectors = (
        getattr(torch, d) for d in (precision.compute, precision.trainable, precision.frozen, precision.vectors)
    )
    try:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                kept.append((module, name, parameter))
                if id(parameter) not in made:
                    dtype = parameter.dtype
                    if dtype.is_floating_point:
                        own = frozen if parameter.ndim > 1 else vectors
                        dtype = own if not parameter.requires_grad else trained if autocast else compute
                    data = torch.empty(parameter.shape, dtype=dtype)
                    made[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
            if isinstance(module, PackedLayer):
                unpacking.append((module, module.statistics))
                module.statistics = module.empty_statistics(getattr(torch, precision.unpacked))
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                kept.append((module, name, buffer))
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        yield model
    finally:
        for module, name, tensor in kept:
            setattr(module, name, tensor)
        for layer, statistics in unpacking:
            layer.statistics = statistics


class Values(DispatchMode):
    """Inside torch's fake mode: operations on tensors with values are computed, those that meet one without are not.

    How many patches a model makes, where their features go among the tokens, and how a mask is shaped depend on values:
    of grids, ids and masks. So such a forward computes whatever no weight, activation or pixel went into, and has
    shapes alone for the rest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_fake(item) for item in leaves((args, kwargs))):
            if func in _INDEXED:
                args = (args[0], _numbers(args[1]), *args[2:])
            return func(*args, **kwargs)
        with modes_off():
            return func(*args, **kwargs)


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _numbers(indices: Sequence[Any]) -> list[Any]:
    """Masks that have values as the numbers of their places: how many these are is a shape, which a mask hides."""
    found: list[Any] = []
    for index in indices:
        mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and not is_fake(index)
        with modes_off():
            found += index.nonzero().unbind(1) if mask else [index]
    return found
