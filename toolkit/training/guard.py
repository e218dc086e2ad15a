"""What a loss that is not finite, or explodes, does to a run: `run.on_bad_loss`."""

from __future__ import annotations

import math
from collections import deque

from toolkit.errors import RunFailed
from toolkit.recipe.schema import Run

SPAN = 20
"""Steps whose mean loss a spike is held against."""
IN_A_ROW = 5
"""Bad steps one after another, or returns to one checkpoint, after which a run is given up: a bad batch is a few
windows, weights that are not finite are every window."""


class LossGuard:
    """Judges the loss of every step. ``recent`` is saved with the run, so that a resumed one judges alike."""

    def __init__(self, run: Run, recent: list[float]) -> None:
        self.policy = run.on_bad_loss
        self.spike = run.loss_spike
        self.recent = deque(recent, maxlen=SPAN)
        self.in_a_row = 0
        self.returns: dict[int, int] = {}

    @property
    def before_the_step(self) -> bool:
        """Whether a bad step must be known before it changes the weights, which waits for the device."""
        return self.policy == "skip"

    def judge(self, loss: float) -> str | None:
        """What is wrong with a step's loss; None, and it is remembered, where nothing is."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        if self.spike is not None and len(self.recent) == SPAN:
            mean = sum(self.recent) / SPAN
            if loss > self.spike * mean:
                return (
                    f"the loss is {loss:.4g}, over {self.spike:g} times the mean of the last {SPAN} steps, {mean:.4g}"
                )
        if self.spike is not None:
            self.recent.append(loss)
        return None

    def skipped(self, bad: bool, step: int) -> None:
        """Count skipped steps in a row; raises RunFailed after too many."""
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if self.in_a_row >= IN_A_ROW:
            raise RunFailed(
                f"step {step}: {IN_A_ROW} steps in a row were skipped for their loss or gradient: it is not one bad "
                "batch. Lower optimizer.lr and go on with --resume, from before them: run.on_bad_loss: rollback"
            )

    def returned(self, checkpoint: int, step: int) -> None:
        """Count the returns to one checkpoint; raises RunFailed after too many."""
        self.returns[checkpoint] = self.returns.get(checkpoint, 0) + 1
        if self.returns[checkpoint] > IN_A_ROW:
            raise RunFailed(
                f"step {step}: the loss went bad {IN_A_ROW + 1} times after the checkpoint of step {checkpoint}; "
                "lower optimizer.lr and go on with --resume"
            )


def refusal(step: int, reason: str) -> RunFailed:
    """A loss that is not finite never comes back; training on would waste the night."""
    return RunFailed(
        f"step {step}: {reason}. Lower optimizer.lr, set optimizer.max_grad_norm, "
        "or use precision: bf16 in place of fp16; the last checkpoint is from before this step. "
        "run.on_bad_loss: skip or rollback goes on by itself"
    )
