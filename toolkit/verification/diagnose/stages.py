"""Causes that only the stages of a pipeline have (``strategy.mesh.pipeline``)."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.verification.compare.measure import Measure
from toolkit.verification.compare.noise import relative_error
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass

_FITS = 1e-4
"""How near a gradient, or a loss, has to be to what it is with a mistake: other masks change it by percents, an order
of sums in float32 by less."""


def wrong_stages(found: Pass, step: int, wrong: Sequence[str]) -> Diagnosis | None:
    """The mistake with stages that explains the ``wrong`` gradients of a step."""
    reference = found.reference
    if reference is None or reference.resolved.mesh.pipeline == 1:
        return None
    tied = {name for group in reference.tied for name in group}
    if wrong and set(wrong) <= tied:
        return Diagnosis("shared-gradient-of-one-stage", {"first": wrong[0]})
    weights, taken = found.ranks[0].run.weights_before(step), found.ranks[0].run.steps[step].gradient
    if not reference.dropout_matters(step, weights):
        return None
    alike = reference.gradients_with_mistake("masks", step, weights)
    pairs = [(taken.get(name), alike[name]) for name in wrong if name in alike]
    if pairs and all(own is not None and relative_error(own, other) < _FITS for own, other in pairs):
        return Diagnosis("masks-of-another-stage", {"stages": reference.resolved.mesh.pipeline})
    return None


def masks_of_stages(found: Pass, measure: Measure) -> Diagnosis | None:
    """Whether the losses of a step are those of stages that all draw the first one's masks."""
    reference, step = found.reference, measure.step
    if reference is None or found.replayed is None or measure.kind != "loss" or reference.resolved.mesh.pipeline == 1:
        return None
    losses = reference.losses_with_mistake("masks", step, found.ranks[0].run.weights_before(step))
    if losses == found.replayed.losses[step]:
        return None
    for (rank, micro), loss in zip(reference.windows[step], losses, strict=True):
        taken = found.parts[rank].run.steps[step].micros
        if micro.micro >= len(taken) or abs(taken[micro.micro].loss - loss) > _FITS * abs(loss):
            return None
    return Diagnosis("masks-of-another-stage", {"stages": reference.resolved.mesh.pipeline})
