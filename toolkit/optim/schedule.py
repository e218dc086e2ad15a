"""The learning rate of every step."""

from __future__ import annotations

import math

from toolkit.recipe.schema import Schedule


def learning_rate(schedule: Schedule, peak: float, update: int, warmup: int, total: int) -> float:
    """Learning rate of the ``update``-th optimizer update, counted from 0.

    The formulas are those of transformers' ``get_*_schedule_with_warmup``, so that the Trainer run from the
    same recipe has the same: linear from 0 over ``warmup`` updates, then constant, linear to 0 or half a cosine
    to 0 at ``total``.
    """
    if update < warmup:
        return peak * update / max(1, warmup)
    progress = (update - warmup) / max(1, total - warmup)
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            return peak * max(0.0, 1.0 - progress)
        case "cosine":
            return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
