"""`run.early_stopping`: end a run whose `run.metric` no longer improves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.recipe.schema import EarlyStopping
from toolkit.training.scores import Score


@dataclass
class Improvement:
    """How the metric of a run develops; saved in checkpoints, so that a resumed run decides the same way.

    ``best``: the value to improve on, None before the first finite one. ``best_step``: its step. ``since``: evaluations
    after it that were no improvement. ``metric``: what it is of; with another one all begins anew.
    """

    best: float | None = None
    best_step: int = 0
    since: int = 0
    metric: str = "eval_loss"

    def judge(self, score: Score, step: int, settings: EarlyStopping) -> None:
        """Count the evaluation of ``step``. A score without a value is no improvement."""
        if score.metric != self.metric:
            self.best, self.best_step, self.since, self.metric = None, 0, 0, score.metric
        sign = -1.0 if score.larger_is_better else 1.0
        value = score.value
        if value is not None and (self.best is None or sign * value < sign * self.best - settings.min_delta):
            self.best, self.best_step, self.since = value, step, 0
        else:
            self.since += 1

    def ends(self, settings: EarlyStopping | None) -> bool:
        """Whether a run with these settings is over."""
        return settings is not None and self.since >= settings.patience

    def reason(self) -> str:
        """Why the run is over."""
        best = "it was never finite" if self.best is None else f"best {self.best:.4f} at step {self.best_step}"
        what = "a lower held-out loss" if self.metric == "eval_loss" else f"a better {self.metric}"
        return f"run.early_stopping: {self.since} evaluations without {what} ({best})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
