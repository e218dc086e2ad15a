"""Causes that only divided layers have (``strategy.mesh.tensor``)."""

from __future__ import annotations

import torch

from toolkit.reference.columns import OF_HEADS, SECOND
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass

_FACTOR = 1e-3
"""How near a gradient has to be to a multiple of the right one: rounding to 16 bits leaves it nearer."""


def wrong_layers(found: Pass, step: int, right: dict[str, torch.Tensor]) -> Diagnosis | None:
    """Whether the ranks of a layer have different gradients of weights that all have, or ones that were summed twice.
    ``right``: the plain loop's gradients of the step, by name."""
    count = 1 if found.reference is None else found.reference.resolved.mesh.tensor
    if count == 1:
        return None
    digests = [rank.run.steps[step].gradient_digests for rank in found.ranks]
    odd = [name for name in digests[0]
           if any(own.get(name) != digests[at - at % count].get(name) for at, own in enumerate(digests))]  # fmt: skip
    if odd:
        heads = all(name.split(".")[-2] in OF_HEADS for name in odd)
        return Diagnosis(
            "head-norms-not-summed" if heads else "hidden-gradients-not-summed",
            {"first": odd[0], "count": len(odd), "ranks": count},
        )
    taken = found.ranks[0].run.steps[step].gradient
    leaving = [name for name in right if any(f".{second}." in name for second in SECOND) and right[name].any()]
    if not leaving:
        return None
    last = leaving[-1]  # nothing that is divided comes after it
    own, seen = right[last].double().flatten(), taken.get(last)
    if seen is None:
        return None
    factor = (own @ seen.double().flatten() / (own @ own)).item()
    after = [name for name in right if "norm" in name and name.split(".")[-2] == "norm"]
    scaled = abs(factor - count) <= _FACTOR * count
    pairs = [(taken.get(name), right[name].double()) for name in after]
    alike = all(g is not None and (g.double() - r).norm() <= 1e-2 * r.norm() for g, r in pairs)
    if not (scaled and alike):
        return None
    return Diagnosis("hidden-gradients-summed-twice", {"first": last, "factor": factor})


def other_masks(found: Pass) -> Diagnosis | None:
    """Where nothing else explains losses that differ, layers are divided, and masks are drawn."""
    reference = found.reference
    if reference is None or reference.resolved.mesh.tensor == 1:
        return None
    # An adapter begins at zero: at the first weights its masks change nothing.
    steps = found.ranks[0].run.steps
    if len(steps) < 2 or not reference.dropout_matters(len(steps) - 1, steps[-2].weights):
        return None
    return Diagnosis("masks-of-layer-ranks", {"ranks": reference.resolved.mesh.tensor})
