"""Experts that several ranks divide, in the plain loop.

What the plain loop computes of such a layer is the layer, with all experts. In 16 bits a product of the rows of several
ranks rounds otherwise than one of each rank's, so it also has the candidate's order of operations: the same micro-batch
of every rank goes through a model of its own, which shares the weights' memory, and they meet in the experts, each part
of which computes the rows of all ranks. That this changes nothing else is shown in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import nn

from toolkit.reference.meeting import Meeting

_HERE: ContextVar[tuple[Meeting, int, bool] | None] = ContextVar("experts", default=None)


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """The model's modules that hold experts: three-dimensional weights, one entry per expert."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "num_experts")
        and any(p.dim() == 3 and p.shape[0] == module.num_experts for p in module.parameters(recurse=False))
    ]


def expert_weights(model: nn.Module) -> set[str]:
    """Names of the weights of experts, those of adapters on them too."""
    inner = {id(layer) for layer in expert_layers(model)}
    found = [name for name, module in model.named_modules() if id(module) in inner]
    while any(name.endswith(".base_layer") for name in found):
        found = [name.removesuffix(".base_layer") for name in found]
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{layer}." for layer in found))}


@contextlib.contextmanager
def meeting_in_experts(models: Sequence[nn.Module], count: int) -> Iterator[None]:
    """Inside, each of ``count`` parts of the experts of ``models`` computes the rows of all threads that meet."""
    layers = [layer for model in models for layer in expert_layers(model)]
    for layer in layers:
        layer.forward = MethodType(_together(type(layer).forward, count), layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextlib.contextmanager
def among_ranks(meeting: Meeting, index: int, misplaced: bool = False) -> Iterator[None]:
    """What the thread computes inside is one rank's. ``misplaced``: it adds results in the order of ranks, for a
    diagnosis."""
    token = _HERE.set((meeting, index, misplaced))
    try:
        yield
    finally:
        _HERE.reset(token)


def _together(own: Callable[..., torch.Tensor], count: int) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        here = _HERE.get()
        assert here is not None
        chosen, each = index.flatten(), self.num_experts // count
        # A token's rows, one for each of its experts: those of the first part's experts first.
        order = torch.cat([(chosen // each == part).nonzero().flatten() for part in range(count)])
        sizes = [int((chosen // each == part).sum()) for part in range(count)]
        brought = self, hidden[order // index.shape[1]].split(sizes), (chosen[order] % each).split(sizes)
        found = here[0].meet(here[1], brought, lambda there: _parts(own, there, count))
        results = torch.cat(found)
        by_choice = (results if here[2] else results[order.argsort()]) * weights.reshape(-1, 1)
        return by_choice.view(*index.shape, -1).sum(1).to(hidden.dtype)

    return forward


def _parts(own: Callable[..., torch.Tensor], there: list[Any], count: int) -> list[list[torch.Tensor]]:
    """What each part of the experts makes of the rows that all ranks bring for it; by rank."""
    results: list[list[torch.Tensor]] = [[] for _ in there]
    for part in range(count):
        rows = torch.cat([rows[part] for _, rows, _ in there])
        experts = torch.cat([experts[part] for _, _, experts in there])
        layer = _some_experts(there[0][0], part, count)
        found = own(layer, rows, experts.unsqueeze(1), torch.ones_like(rows[:, :1]))
        for result, own_rows in zip(results, found.split([len(rows[part]) for _, rows, _ in there]), strict=True):
            result.append(own_rows)
    return results


def _some_experts(layer: Any, part: int, count: int) -> Any:
    """The layer with one of ``count`` equal parts of its experts alone."""
    # PEFT's adapters make a weight a property of a class of its own, inside of their forward.
    adapted = layer.parametrizations if hasattr(layer, "parametrizations") else ()
    kind: Any = type(layer).__mro__[1] if adapted else type(layer)
    some = kind.__new__(kind)
    some.__dict__ = layer.__dict__ | {"_parameters": {}}
    some.num_experts = layer.num_experts // count
    for name in (*dict(layer.named_parameters(recurse=False)), *adapted):
        object.__setattr__(some, name, getattr(layer, name).chunk(count)[part])
    return some
