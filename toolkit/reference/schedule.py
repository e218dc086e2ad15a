"""The learning rate of every update, from the recipe only."""

from __future__ import annotations

import math

from toolkit.recipe.resolve import Resolved


def plain_learning_rate(resolved: Resolved, update: int, total: int) -> float:
    """Learning rate of the ``update``-th change of the weights, from 0: a straight line from 0 to the peak over the
    warm-up, then the peak times ``plain_share``. Groups have a multiple of it."""
    peak, warmup = plain_peak(resolved), resolved.warmup(total)
    if update < warmup:
        return peak * (update / warmup)
    return peak * plain_share(resolved.recipe.schedule, update, warmup, total)


def plain_peak(resolved: Resolved) -> float:
    """The recipe's rate, grown with the batch or with its root where the recipe says so."""
    settings = resolved.recipe.optimizer
    scaling = getattr(settings, "lr_scaling", "none")
    if scaling == "none":
        return settings.lr
    assert settings.base_global_batch is not None
    exponent = {"linear": 1.0, "sqrt": 0.5}[scaling]
    samples = resolved.micro_size * resolved.accumulation * resolved.data_size
    return settings.lr * math.pow(samples / settings.base_global_batch, exponent)


def plain_share(schedule: object, update: int, warmup: int, total: int) -> float:
    """The part of the peak that is left after the warm-up. ``least`` is what remains at the end."""
    name = getattr(schedule, "name", "constant")
    least = getattr(schedule, "min_ratio", None) or 0.0
    if name == "constant":
        return 1.0
    if name == "inverse-sqrt":  # Vaswani et al., arXiv:1706.03762, section 5.3: 1 / root, equal to 1 where it begins
        begins = warmup if warmup else 10_000
        return (begins / (begins + update - warmup)) ** 0.5
    if name == "wsd":
        share = getattr(schedule, "decay_ratio", None)
        last = getattr(schedule, "decay_steps", None) or math.ceil((share or 0.0) * total)
        left = 1.0 if not last else min(1.0, max(0.0, (total - update) / last))
        shape = getattr(schedule, "decay_shape", None) or "linear"
        if update < total - last:
            return 1.0
        kept = {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "1-sqrt": 1 - (1 - left) ** 0.5}[shape]
        return least + (1 - least) * kept
    left = max(0.0, (total - update) / max(1, total - warmup))
    if name == "linear":
        return left
    if name == "polynomial":
        return least + (1 - least) * math.pow(left, getattr(schedule, "power", None) or 1.0)
    return least + (1 - least) * 0.5 * (1.0 - math.cos(math.pi * left))
