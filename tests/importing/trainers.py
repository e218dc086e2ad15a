"""Runs a transformers Trainer and reads its losses, which it logs with four digits, in full."""

from __future__ import annotations

from typing import Any


def losses_of(trainer: Any) -> list[float]:
    """The loss of each optimizer step: the sum of what ``training_step`` returns over its micro-batches."""
    steps: list[list[float]] = []
    original = trainer.training_step

    def recorded(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        while len(steps) <= trainer.state.global_step:
            steps.append([])
        steps[trainer.state.global_step].append(float(loss))
        return loss

    trainer.training_step = recorded
    trainer.train()
    return [sum(parts) for parts in steps]
