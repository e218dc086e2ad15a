"""`run.early_stopping`: end a run whose held-out loss no longer improves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from toolkit.recipe.schema import EarlyStopping


@dataclass
class Improvement:
    """How the held-out loss of a run develops; saved in checkpoints, so that a resumed run decides the same way.

    ``best``: the loss to improve on, None before the first finite one. ``best_step``: its step. ``since``: evaluations
    after it that were no improvement.
    """

    best: float | None = None
    best_step: int = 0
    since: int = 0

    def judge(self, loss: float | None, step: int, settings: EarlyStopping) -> None:
        """Count the evaluation of ``step``. ``loss``: None if it was not finite, which is no improvement."""
        if loss is not None and (self.best is None or loss < self.best - settings.min_delta):
            self.best, self.best_step, self.since = loss, step, 0
        else:
            self.since += 1

    def ends(self, settings: EarlyStopping | None) -> bool:
        """Whether a run with these settings is over."""
        return settings is not None and self.since >= settings.patience

    def reason(self) -> str:
        """Why the run is over."""
        best = "it was never finite" if self.best is None else f"best {self.best:.4f} at step {self.best_step}"
        return f"run.early_stopping: {self.since} evaluations without a lower held-out loss ({best})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
