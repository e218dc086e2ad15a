"""Causes that only a mesh has: second copies of weights that are not renewed."""

from __future__ import annotations

from toolkit.verification.compare.measure import Measure
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass

_FITS = 1e-4
"""How near the losses have to be: a step changes them by more, float32 rounding by less."""


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
    losses = reference.gradient(step, weights)[0]
    for (rank, micro), loss in zip(reference.windows[step], losses, strict=True):
        taken = found.parts[rank].run.steps[step].micros
        if micro.micro >= len(taken) or abs(taken[micro.micro].loss - loss) > _FITS * abs(loss):
            return None
    return Diagnosis("weights-of-an-earlier-step", {"step": step + 1})
