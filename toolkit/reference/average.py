"""The moving average of weights, by its definition in float64."""

from __future__ import annotations

from typing import Any

import torch


def plain_average(before: torch.Tensor, weight: torch.Tensor, updates: int, settings: Any) -> torch.Tensor:
    """The average after so many ``updates``, from the one ``before`` and the weight. ``settings``: the recipe's
    ``run.ema``."""
    if updates <= settings.start:
        return weight.double()
    if (updates - settings.start) % settings.every:
        return before.double()
    return settings.decay * before.double() + (1 - settings.decay) * weight.double()
