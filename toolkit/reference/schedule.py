"""The learning rate of every update, from the recipe only."""

from __future__ import annotations

import math

from toolkit.recipe.resolve import Resolved


def plain_learning_rate(resolved: Resolved, update: int, total: int) -> float:
    """Learning rate of the ``update``-th change of the weights, from 0: a straight line from 0 to the peak over the
    warm-up, then the peak, a line to 0, or half a cosine to 0, reached at ``total``."""
    peak, name = resolved.recipe.optimizer.lr, resolved.recipe.schedule.name
    warmup = resolved.warmup(total)
    if update < warmup:
        return peak * (update / warmup)
    if name == "constant":
        return peak
    left = max(0.0, (total - update) / max(1, total - warmup))
    if name == "linear":
        return peak * left
    return peak * 0.5 * (1.0 - math.cos(math.pi * left))
