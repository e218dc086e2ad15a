"""Weights that have a dtype and a place where tensors are made now, and no values."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from toolkit.model.nf4 import Nf4Linear
from toolkit.recipe.resolve import Precision
from toolkit.upstream.torch import fake_mode


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
    unpacking: list[tuple[Nf4Linear, Any]] = []
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
            if isinstance(module, Nf4Linear):
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
