"""The moving average of weights by its definition, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from toolkit.recipe.schema import Ema
from toolkit.reference.option import PlainOption


@dataclass(frozen=True)
class PlainAverage(PlainOption):
    roundings: ClassVar = 3
    """Of the difference from the weight, of what is added of it, and of the sum."""

    decay: float
    every: int
    start: int

    def shadow(self, before: torch.Tensor, weight: torch.Tensor, updates: int) -> torch.Tensor:
        if updates <= self.start:
            return weight.double()
        if (updates - self.start) % self.every:
            return before.double()
        return self.decay * before.double() + (1 - self.decay) * weight.double()


def plain(settings: Ema) -> PlainAverage:
    return PlainAverage(settings.decay, settings.every, settings.start)
