"""The learning rate of every step."""

from __future__ import annotations

import math

from toolkit.recipe.rates import decay_steps
from toolkit.recipe.schema import Schedule


def learning_rate(schedule: Schedule, peak: float, update: int, warmup: int, total: int) -> float:
    """Learning rate of the ``update``-th optimizer update, counted from 0.

    The formulas are those of transformers' ``get_*_schedule_with_warmup``, so that the Trainer run from the
    same recipe has the same: linear from 0 over ``warmup`` updates, then the schedule's course to ``total``.
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
            return peak * _above(schedule.min_ratio, max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress))))
        case "polynomial":
            return peak * _above(schedule.min_ratio, max(0.0, 1.0 - progress) ** (schedule.power or 1.0))
        case "inverse-sqrt":
            scale = warmup or INVERSE_SQRT_SCALE
            return peak / math.sqrt((update - warmup + scale) / scale)
        case "wsd":
            steps = decay_steps(schedule, total)
            decayed = min(1.0, max(0.0, (update - (total - steps)) / max(1, steps)))
            return peak * _above(schedule.min_ratio, _remaining(schedule.decay_shape or "linear", decayed))


INVERSE_SQRT_SCALE = 10_000
"""Updates after which the rate has fallen by the root of two, where there is no warm-up (transformers 5.23.0,
``get_inverse_sqrt_schedule``)."""


def _above(least: float | None, factor: float) -> float:
    """A factor between 0 and 1 as one between ``least`` and 1."""
    return factor if not least else factor * (1.0 - least) + least


def _remaining(shape: str, progress: float) -> float:
    match shape:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "1-sqrt":
            return 1.0 - math.sqrt(progress)
        case _:
            return 1.0 - progress
