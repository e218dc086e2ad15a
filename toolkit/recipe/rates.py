"""What the global batch does to the learning rate, and the steps that `wsd` decays."""

from __future__ import annotations

import math

from toolkit.recipe.schema import Optimizer, Recipe, Schedule


def rate_factor(optimizer: Optimizer, global_batch: int) -> float:
    """What every learning rate of the recipe is multiplied by for this number of samples per optimizer step.

    ``linear``: Goyal et al., arXiv:1706.02677, section 2.1. ``sqrt``: Krizhevsky, arXiv:1404.5997, section 5.
    """
    if optimizer.base_global_batch is None:
        return 1.0
    ratio = global_batch / optimizer.base_global_batch
    return ratio if optimizer.lr_scaling == "linear" else ratio**0.5


def why_rate(optimizer: Optimizer, global_batch: int) -> str:
    """The reason for the peak learning rate, in words."""
    if optimizer.base_global_batch is None:
        return f"lr_scaling: none: a larger global batch (here {global_batch}) or more processes do not change it"
    root = "" if optimizer.lr_scaling == "linear" else "the root of "
    return (
        f"lr_scaling: {optimizer.lr_scaling}: {optimizer.lr:g} x {root}global batch {global_batch} / base_global_batch "
        f"{optimizer.base_global_batch}; more processes with the same micro_size and accumulation change it"
    )


def decay_steps(schedule: Schedule, total: int) -> int:
    """Updates of the decay of ``wsd`` (Hu et al., arXiv:2404.06395, section 4.2), the last of ``total``."""
    if schedule.decay_steps is not None:
        return schedule.decay_steps
    return math.ceil((schedule.decay_ratio or 0.0) * total)


def why_no_wsd(recipe: Recipe) -> str | None:
    """Why the Trainer's ``warmup_stable_decay`` (transformers 5.23.0) differs from the recipe's schedule, or None."""
    schedule = recipe.schedule
    if recipe.run.max_steps is None:
        return "its decay needs a number of steps; set run.max_steps"
    if schedule.min_ratio and (schedule.warmup_ratio or schedule.warmup_steps):
        return "with min_ratio its warm-up begins at the lowest rate instead of 0"
    return None
