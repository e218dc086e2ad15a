"""Causes that only divided experts have (``strategy.mesh.expert``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.reference.experts import expert_layers, expert_weights
from toolkit.verification.compare.measure import Measure
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.mesh import same_losses
from toolkit.verification.passes import Pass

_FACTOR = 1e-3
"""How near a gradient has to be to a multiple of the right one: rounding to 16 bits leaves it nearer."""


def wrong_experts(found: Pass, step: int, wrong: Sequence[str], right: dict[str, torch.Tensor]) -> Diagnosis | None:
    """Whether copies of experts have different gradients, or those of experts alone are multiples of the right ones, or
    those of adapters on them of other experts. ``right``: the plain loop's gradients of the step, by name."""
    reference = found.reference
    if reference is None or reference.resolved.mesh.expert == 1:
        return None
    mesh, of_experts = reference.resolved.mesh, expert_weights(reference.loop.model)
    experts = [name for name in right if name in of_experts]
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
    layer: Any = expert_layers(reference.loop.model)[0]
    if all(_of_other_experts(name, taken.get(name), right[name], mesh.expert, layer.num_experts) for name in wrong):
        return Diagnosis("expert-adapters-mixed", {"count": len(wrong), "first": wrong[0]})
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


def _of_other_experts(name: str, gradient: torch.Tensor | None, right: torch.Tensor, parts: int, experts: int) -> bool:
    """Whether columns of B (out, rank of all experts) are right, but in the order of a matrix that was cut into
    ``parts`` of consecutive columns. They are those of all experts for one rank of the adapter after another."""
    if gradient is None or ".lora_B." not in name or right.shape[1] % experts:
        return False
    rank, each = right.shape[1] // experts, experts // parts
    moved = right.view(-1, rank, parts, each).transpose(1, 2).reshape(right.shape)
    return not torch.equal(moved, right) and (gradient - moved).norm().item() < _FACTOR * right.norm().item()


def misplaced(found: Pass, measure: Measure) -> Diagnosis | None:
    """Whether the losses of a step are those of experts whose results come back in another order."""
    reference, step = found.reference, measure.step
    if reference is None or measure.kind != "loss" or reference.resolved.mesh.expert == 1:
        return None
    weights = found.ranks[0].run.weights_before(step)
    if not same_losses(found, step, reference.losses_with_mistake("order", step, weights)):
        return None
    return Diagnosis("expert-results-misplaced", {"step": step + 1})
