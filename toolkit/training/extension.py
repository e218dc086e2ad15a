"""Resume with another `run.max_steps` or `run.epochs`: whether and how that changes the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from toolkit.errors import InputError
from toolkit.optim.schedule import learning_rate
from toolkit.recipe.schema import Recipe, Run
from toolkit.training.loop import Progress

Rate = Callable[[int], float]
"""The learning rate of an update, counted from 0."""


def total_steps(run: Run, steps_per_epoch: int | None, source: str) -> int:
    """Optimizer steps of a run; raises InputError for epochs of a stream, whose length is not known."""
    if run.max_steps is not None:
        return run.max_steps
    if steps_per_epoch is None:
        raise InputError(f"{source}: run.epochs: the length of a stream is not known; set run.max_steps")
    return (run.epochs or 1) * steps_per_epoch


def check_length(
    saved: Recipe,
    recipe: Recipe,
    steps_per_epoch: int | None,
    progress: Progress,
    *,
    extend: bool,
    source: str,
    folder: Path,
    rate_factor: float = 1.0,
) -> str | None:
    """Compare the recipe's length with that of the checkpoint ``folder``; returns a note for the user, or None if it is
    equal.

    ``saved``: the checkpoint's recipe. ``source``: the file of ``recipe``. If the learning rates of the completed steps
    are the same under both lengths, the run equals the one that ``recipe`` describes. Otherwise ``extend`` is required,
    and ``progress`` records the change for every later checkpoint. ``rate_factor``: of the learning rates that are
    shown (``Resolved.rate_factor``).

    Raises InputError if ``extend`` is required and missing, or if more steps are completed than ``recipe`` has.
    """
    there, here = (total_steps(one.run, steps_per_epoch, source) for one in (saved, recipe))
    if there == here:
        return None
    before, after, updates = rates(saved, there, rate_factor), rates(recipe, here, rate_factor), progress.updates
    key = _length(recipe.run)
    if here < progress.step:
        raise InputError(
            f"{source}: {key}: {folder} is already at step {progress.step}, but this recipe has {here} steps; set "
            f"{progress.step} steps or more, or start a new run in another run.output_dir"
        )
    doing = "extended" if here > there else "shortened"
    changed = next((update for update in reversed(range(updates)) if before(update) != after(update)), None)
    if changed is None:
        return f"{doing} from {there} to {here} steps: the learning rates of the completed steps are the same"
    nearby = [progress.step + 1, there, here]
    shown = [step for step in dict.fromkeys(nearby) if progress.step < step <= here]
    at = {step: updates + step - progress.step - 1 for step in shown}
    if not extend:
        taken = f"{changed + 1} (completed)"
        rows = [
            ("learning rate of step", "checkpoint", "recipe"),
            (taken, f"{before(changed):.4g}", f"{after(changed):.4g}"),
        ]
        for step, update in at.items():
            rows.append((str(step), f"{before(update):.4g}" if step <= there else "-", f"{after(update):.4g}"))
        raise InputError(
            f"{source}: {key}: {there} steps in {folder}, {here} in this recipe, and schedule.name: "
            f"{recipe.schedule.name} "
            "depends on the number of steps",
            *(f"  {left:<22} {middle:>10} {right:>10}" for left, middle, right in rows),
            f"Add --extend to continue from step {progress.step + 1} with the rates of this recipe, or set "
            f"{_length(saved.run)} to resume the run with its original length",
        )
    progress.extensions.append({"step": progress.step, "from_steps": there, "to_steps": here})
    listed = "; ".join(f"step {step}: {after(update):.4g}" for step, update in at.items())
    old = f" (before: step {progress.step + 1}: {before(updates):.4g})" if progress.step < there else ""
    return f"{doing} from {there} to {here} steps; learning rates: {listed or 'no step is left'}{old}"


def rates(recipe: Recipe, total: int, factor: float) -> Rate:
    """The learning rates of a recipe that takes ``total`` steps. ``factor``: see ``Resolved.rate_factor``."""
    schedule, peak = recipe.schedule, recipe.optimizer.lr * factor
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.ceil((schedule.warmup_ratio or 0.0) * total)  # as Resolved.warmup
    return lambda update: learning_rate(schedule, peak, update, warmup, total)


def _length(run: Run) -> str:
    return f"run.max_steps: {run.max_steps}" if run.max_steps is not None else f"run.epochs: {run.epochs}"
