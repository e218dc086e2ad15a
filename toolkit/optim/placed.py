"""Optimizers whose step depends on the place of an element in its whole weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """``size`` elements of a tensor that is updated, flattened, from ``start`` on: those of the weight ``name``,
    flattened, from ``first`` on."""

    name: str
    first: int
    start: int
    size: int


class PlacedOptimizer(torch.optim.Optimizer):
    """``locate`` is called for every tensor of the groups before the first step."""

    def locate(self, tensor: torch.Tensor, places: Sequence[Place]) -> None:
        """Say which elements of which weights ``tensor``, one of a group, has on this rank; what is in no place
        (padding) stays as it is."""
        raise NotImplementedError
