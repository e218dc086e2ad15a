"""Causes that only divided experts have (``strategy.mesh.expert``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.verification.compare.measure import Measure
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.mesh import same_losses
from toolkit.verification.passes import Pass

_FACTOR = 1e-3
"""How near a gradient has to be to a multiple of the right one: rounding to 16 bits leaves it nearer."""


def wrong_experts(found: Pass, step: int, wrong: Sequence[str], right: dict[str, torch.Tensor]) -> Diagnosis | None:
    """Whether copies of experts have different gradients, or those of experts alone are multiples of the right ones.
    ``right``: the plain loop's gradients of the step, by name."""
    mesh = None if found.reference is None else found.reference.resolved.mesh
    if mesh is None or mesh.expert == 1:
        return None
    experts = [name for name, gradient in right.items() if gradient.dim() == 3]
    digests = [rank.run.steps[step].gradient_digests for rank in found.ranks]
    first = [digests[mesh.expert_peers(at)[0]] for at in range(len(digests))]
    pairs = list(zip(digests, first, strict=True))
    apart = [name for name in experts if any(own.get(name) != other.get(name) for own, other in pairs)]
    if apart:
        copies = len(digests) // mesh.expert
        return Diagnosis("expert-copies-not-summed", {"first": apart[0], "count": len(apart), "ranks": copies})
    if not set(wrong) <= set(experts):
        return None
    taken = found.ranks[0].run.steps[step].gradient
    factors = []
    for name in wrong:
        gradient = taken.get(name)
        if gradient is None:
            return None
        own, seen = right[name].double().flatten(), gradient.double().flatten()
        factor = (own @ seen / (own @ own)).item()
        if (seen - factor * own).norm() > _FACTOR * seen.norm():
            return None
        factors.append(factor)
    if not factors or max(factors) - min(factors) > _FACTOR * max(factors):
        return None
    return Diagnosis("expert-gradients-scaled", {"factor": factors[0], "count": len(factors)})


def misplaced(found: Pass, measure: Measure) -> Diagnosis | None:
    """Whether the losses of a step are those of experts whose results come back in another order."""
    reference, step = found.reference, measure.step
    if reference is None or measure.kind != "loss" or reference.resolved.mesh.expert == 1:
        return None
    run = found.ranks[0].run
    weights = run.weights if step == 0 else run.steps[step - 1].weights
    if not same_losses(found, step, reference.losses_with_mistake("order", step, weights)):
        return None
    return Diagnosis("expert-results-misplaced", {"step": step + 1})
