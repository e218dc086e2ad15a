"""``run.ema``: its key, what it cannot be with, and what it keeps."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers import optimizer_kind
from toolkit.rooms import Option, Shadow


class MovingAverage(Option):
    name = "ema"
    title = "an exponential moving average of the trained weights, exported on request"
    typed_key = "run.ema"
    axes = frozenset({"context", "pipeline"})
    claim = None
    missing = ""
    shadow = Shadow(
        "average", "the moving average of the weights", "averaged weights", "average-wrong", "average-not-restored"
    )

    def refusals(self, settings: Any, recipe: Any) -> list[str]:
        problems = []
        if recipe.precision == "bf16-pure":
            problems.append("run.ema: averages float32 weights, and precision: bf16-pure has none; use bf16")
        if (kind := optimizer_kind(recipe.optimizer.name)).averages:
            problems.append(f"run.ema: {kind.name} already averages the weights; remove run.ema")
        return problems

    def decision(self, settings: Any) -> tuple[str, str]:
        rule = f"decay {settings.decay:g}, every {settings.every} updates, after {settings.start}"
        return rule, "4 bytes per trained parameter, sharded as the weights; not in training_args.json"

    def apply(self, model: Any, settings: Any) -> None:
        """No forward computes with the average."""

    def shorten(self, values: dict[str, Any]) -> None:
        """Within a few steps the average begins, and changes by more than it is rounded."""
        ema = values["run"]["ema"]
        ema |= {"decay": min(ema["decay"], 0.9), "every": min(ema["every"], 2), "start": min(ema["start"], 1)}
