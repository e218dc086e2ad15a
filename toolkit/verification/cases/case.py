"""One run to verify: a resolved recipe of one precision, its samples, and what shall happen on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.loop import Compute
from toolkit.strategies import resolve
from toolkit.verification.cases.samples import RaggedSamples

PassName = Literal["logic", "precision"]

STEPS = 5
"""An epoch of three whole windows and a short one, and the first window of the next epoch."""
FULL_WINDOWS = 3
SAVE_AFTER = 3
"""The checkpoint of the round trip: what follows it is the short window and the next epoch."""
CALM_SCALE = 2.0**10
"""Loss scale that a recorded fp16 run begins with at most. torch's 65536 is meant to overflow until it fits, and a step
that overflows by itself leaves nothing to compare; one step is made to overflow."""
OVERFLOW_STEP = 2
"""Under fp16, the step (from 0) whose loss scale is set so high that gradients overflow."""


@dataclass
class Case:
    """Picklable: handed to every rank. ``recipe`` is the twin's; ``folder`` is where ranks leave their traces."""

    recipe: dict[str, Any]
    source: str
    device: str
    pass_name: PassName
    samples: RaggedSamples
    folder: Path
    steps: int = STEPS
    fault: str | None = None
    mutation: dict[str, Any] | None = None
    round_trip: bool = True
    overflow_step: int | None = None
    loss_scale: float = CALM_SCALE
    """Under fp16, at the start."""
    extras: dict[str, Any] = field(default_factory=dict)

    def resolved(self) -> Resolved:
        return resolve(Recipe.model_validate(self.recipe), self.source, device=self.device)


def counted_step(resolved: Resolved) -> int:
    """The step in which operators of options are counted: the first; of compiled code the last, since what torch runs
    while it compiles looks the same."""
    return STEPS - 1 if resolved.recipe.compile else 0


def compute_of(resolved: Resolved) -> Compute:
    """How the reference computes to match the strategy's mixed precision."""
    if not resolved.precision.mixed:
        return "plain"
    return "autocast" if resolved.traits.autocast else "copy"
