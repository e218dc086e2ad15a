"""What happens when a loss is not finite or spikes: `run.on_bad_loss`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from toolkit.errors import RunFailed
from toolkit.recipe.schema import Run

SPAN = 20
"""A spike is measured against the mean loss of this many steps."""
IN_A_ROW = 5
"""The run ends after this many consecutive bad steps, or returns to one checkpoint: a bad batch affects a few windows,
weights that are not finite affect every window."""


class LossGuard:
    """Checks the loss of every step. ``recent`` is saved with the run, so that a resumed run decides the same way."""

    def __init__(self, run: Run, recent: list[float]) -> None:
        self.policy = run.on_bad_loss
        self.spike = run.loss_spike
        self.recent = deque(recent, maxlen=SPAN)
        self.in_a_row = 0
        self.returns: dict[int, int] = {}

    @property
    def before_the_step(self) -> bool:
        """Whether the loss is checked before the update; this synchronises the device."""
        return self.policy == "skip"

    def judge(self, loss: float) -> str | None:
        """What is wrong with a step's loss. None if nothing is; the loss is then added to ``recent``."""
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

    def skipped(self, bad: bool, step: int, why: Sequence[str] = ()) -> None:
        """Count skipped steps in a row; raises RunFailed after too many. ``why``: lines for its message."""
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if self.in_a_row >= IN_A_ROW:
            raise RunFailed(
                f"step {step}: {IN_A_ROW} steps in a row were skipped for a bad loss or gradient: the cause is not one "
                "bad batch. Start a new run with a lower optimizer.lr, or --resume with run.on_bad_loss=rollback"
                f"{_below(why)}"
            )

    def returned(self, checkpoint: int, step: int, why: Sequence[str] = ()) -> None:
        """Count the returns to one checkpoint; raises RunFailed after too many. ``why``: as for ``skipped``."""
        self.returns[checkpoint] = self.returns.get(checkpoint, 0) + 1
        if self.returns[checkpoint] > IN_A_ROW:
            raise RunFailed(
                f"step {step}: the loss went bad {IN_A_ROW + 1} times after the checkpoint of step {checkpoint}; "
                f"start a new run with a lower optimizer.lr{_below(why)}"
            )


def _below(why: Sequence[str]) -> str:
    return "".join(f"\n{line}" for line in why)


def refusal(step: int, reason: str, why: Sequence[str] = ()) -> RunFailed:
    """The error for a bad loss under `run.on_bad_loss: stop`: training does not recover from it."""
    return RunFailed(
        f"step {step}: {reason}. No checkpoint includes this step: --resume with run.on_bad_loss=skip or rollback "
        f"continues automatically. Or {_NEW_RUN}{_below(why)}"
    )


def no_way_back(step: int, reason: str, why: Sequence[str] = ()) -> RunFailed:
    """The error for a bad loss under `run.on_bad_loss: rollback` before the first checkpoint."""
    return RunFailed(
        f"step {step}: {reason}. run.on_bad_loss: rollback: no checkpoint was saved before it. Lower run.save_every, "
        f"or {_NEW_RUN}{_below(why)}"
    )


_NEW_RUN = "start a new run with a lower optimizer.lr, optimizer.max_grad_norm set, or precision: bf16 instead of fp16"
