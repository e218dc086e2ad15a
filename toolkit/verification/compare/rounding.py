"""Bounds of what a correct optimizer step may be off by, where an estimate from correct steps does not do: tensors of
few elements, terms that cancel each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FEW = 64
"""Elements below which torch's own implementations may round a tensor exactly by luck, and a bound is needed. From 64
on their mean square error is below a sixteenth of the largest possible with a probability of 4e-19 (Chernoff's bound
for squares of uniform variables)."""

DEVIATIONS = 7.0
"""Standard deviations that a fitted coefficient may be off by: a normal variable is with a probability of 2.6e-12."""

_BEYOND = math.erfc(DEVIATIONS / math.sqrt(2))

_MANY = 32
"""Elements that a fit needs for its deviation to differ from its residuals (a scalar parameter has none)."""


@dataclass(frozen=True)
class Fit:
    """A clipping coefficient as the first moment shows it, and how well that determines it: ``deviation`` estimated
    from the residuals, ``bound`` where no element of the moment is off by more than four roundings of its terms,
    ``elements``: how many of equal size would determine it as well."""

    value: float
    deviation: float
    bound: float
    elements: float

    @property
    def spread(self) -> tuple[float, float]:
        """How far a right value may be off, and the chance that it is off by more. Moments that are rounded more than
        they should be determine it less: that is for the stage that looks at moments."""
        spread = DEVIATIONS * self.deviation
        return (spread, _BEYOND) if self.elements >= _MANY else (max(spread, self.bound), 0.0)


def applied_coefficient(fit: Fit | None, expected: float, rounding: float) -> float:
    """The clipping coefficient of the step that is compared: the fitted one, since that is computed from a norm that is
    ``rounding`` off, relatively. Where nothing is clipped it is exactly 1, unless the fit rules that out: after a step
    of large gradients the moments show it to few digits."""
    if fit is None:
        return expected
    spread = max(rounding, fit.spread[0])
    return 1.0 if expected == 1.0 and abs(fit.value - 1.0) <= spread else fit.value


def update_bound(before: torch.Tensor, change: torch.Tensor, eps: float) -> float:
    """Of an update's error in the 2-norm, relative to ``change``: the weight is rounded up to three times, what is
    added to it up to sixteen times. ``eps``: of the weights' dtype."""
    size = change.norm().item()
    largest = torch.maximum(before.double().abs(), (before.double() + change).abs()).norm().item()
    return eps * (1.5 * largest / size + 8) if size else 0.0


def moment_bound(summed: torch.Tensor, right: torch.Tensor, eps: float) -> float:
    """Of a moment's error in the 2-norm, relative to ``right``: four roundings of its terms."""
    size = right.norm().item()
    return 2 * eps * summed.norm().item() / size if size else 0.0
