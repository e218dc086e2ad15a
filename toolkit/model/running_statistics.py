"""Running statistics: buffers that a forward in training changes, as batch normalisation has them. Ranks share them, a
checkpoint and an export have them, and a replayed step starts from them. Options supply the layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn


class RunningLayer(nn.Module):
    """Base of layers with running statistics."""

    noun: ClassVar[str]
    """What they are statistics of, for messages."""
    statistics: ClassVar[tuple[str, ...]]
    """The names of its buffers that hold them; one may be None."""
    by_rank = False
    """Whether each rank has its own; a checkpoint has those of rank 0."""


class Now:
    """What happens around such layers. A plain object: on a GPU the backward, and a recomputation in it, run in a
    thread of autograd's own."""

    counts = True
    """Whether this rank's micro-batch has samples; a dummy that only joins the collectives does not enter."""
    recomputing = False
    """Whether a block is computed for the second time: its batch has been counted."""


@contextlib.contextmanager
def counting(counts: bool) -> Iterator[None]:
    """Around a micro-batch's forward and backward: whether its rows enter the statistics."""
    before, Now.counts = Now.counts, counts
    try:
        yield
    finally:
        Now.counts = before


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Around a block's recomputation in the backward: running statistics have been updated by its forward."""
    before, Now.recomputing = Now.recomputing, True
    try:
        yield
    finally:
        Now.recomputing = before


def running_layers(model: nn.Module) -> dict[str, RunningLayer]:
    """The layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RunningLayer)}


def statistics(layers: Mapping[str, RunningLayer]) -> dict[str, torch.Tensor]:
    """Every running statistic by its name in the model, on its device."""
    named = {f"{layer}.{name}": getattr(module, name) for layer, module in layers.items() for name in module.statistics}
    return {name: value.detach() for name, value in named.items() if value is not None}


def from_first_rank(layers: Mapping[str, RunningLayer]) -> None:
    """Give every rank the running statistics of rank 0, which checkpoints hold, where each has its own."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for value in statistics({name: layer for name, layer in layers.items() if layer.by_rank}).values():
            dist.broadcast(value, src=0)
