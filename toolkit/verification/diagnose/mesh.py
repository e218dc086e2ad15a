"""Causes that only a mesh has: second copies of weights that are not renewed, and rows whose parts do not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from toolkit.reference.context import Mistake
from toolkit.verification.compare.ledger import rows_of
from toolkit.verification.compare.measure import Measure
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass

_FITS = 1e-4
"""How near the losses have to be: a step changes them by more, float32 rounding by less."""


_MISTAKES: tuple[tuple[Mistake, str], ...] = (
    ("positions", "positions-restart"),
    ("edges", "predictions-lost-at-edges"),
    ("alone", "attention-within-parts"),
    ("keys", "key-heads-of-another-rank"),
    ("masks", "masks-of-another-part"),
)


def wrong_parts(found: Pass, measure: Measure) -> Diagnosis | None:
    """The mistake with the parts of rows under which the plain loop comes nearest to the losses of a step. Right losses
    are beyond a tolerance far below ``_FITS``, so a mistake has to come nearer than they do."""
    reference, step = found.reference, measure.step
    if reference is None or found.replayed is None or measure.kind != "loss" or reference.resolved.mesh.context == 1:
        return None
    weights = found.ranks[0].run.weights_before(step)
    distances = {
        cause: _distance(found, step, reference.losses_with_mistake(mistake, step, weights))
        for mistake, cause in _MISTAKES
    }
    cause = min(distances, key=lambda cause: distances[cause])
    if distances[cause] > _FITS or distances[cause] >= _distance(found, step, found.replayed.losses[step]):
        return None
    return Diagnosis(cause, {"step": step + 1, "parts": reference.resolved.mesh.context})


def other_rows(found: Pass, step: int) -> Diagnosis | None:
    """Whether ranks that divide rows, or layers, between them were given different rows."""
    resolved = None if found.reference is None else found.reference.resolved
    first = [resolved.data_rank(rank.rank) if resolved else rank.rank for rank in found.ranks]
    seen = [[rows_of(micro.tensors) for taken in rank.run.steps[step : step + 1] for micro in taken.micros]
            for rank in found.ranks]  # fmt: skip
    odd = [rank for rank, rows in enumerate(seen) if rows != seen[first.index(first[rank])]]
    if not odd:
        return None
    numbers = ", ".join(map(str, odd))
    return Diagnosis(
        "parts-of-different-rows", {"measure": f"step {step + 1}: rank {numbers}, not as its first neighbour"}
    )


def same_losses(found: Pass, step: int, losses: Sequence[float]) -> bool:
    """Whether the ranks have these losses of a step's micro-batches, in the order of the plain loop's window."""
    return _distance(found, step, losses) <= _FITS


def _distance(found: Pass, step: int, losses: Sequence[float]) -> float:
    """The largest relative deviation of the ranks' losses from these; infinite where they have other micro-batches."""
    assert found.reference is not None
    largest = 0.0
    for (rank, micro), loss in zip(found.reference.windows[step], losses, strict=True):
        taken = found.parts[rank].run.steps[step].micros
        if micro.micro >= len(taken):
            return math.inf
        apart = abs(taken[micro.micro].loss - loss)
        if not math.isfinite(apart):
            return math.inf
        if apart > 0.0:
            largest = max(largest, apart / abs(loss) if loss else math.inf)
    return largest


def stale_copies(found: Pass, measure: Measure) -> Diagnosis | None:
    """Whether the losses of a step are those of the first weights, small ones excepted, which are not sharded."""
    reference, step = found.reference, measure.step
    if reference is None or step == 0 or measure.kind != "loss":
        return None
    resolved = reference.resolved
    if not resolved.mesh.hybrid or resolved.traits.hybrid != "weights":
        return None
    run = found.ranks[0].run
    small = resolved.settings.persistence_threshold
    weights = {
        name: run.weights[name] if weight.numel() >= small else weight
        for name, weight in run.steps[step - 1].weights.items()
    }
    if not same_losses(found, step, reference.gradient(step, weights)[0]):
        return None
    return Diagnosis("weights-of-an-earlier-step", {"step": step + 1})
