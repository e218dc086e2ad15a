"""Causes of a wrong gradient: from the weights that its micro-batches have in it, and from where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from toolkit.recipe.mesh import Mesh
from toolkit.verification.cases.case import Case
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import NO_SIGNAL, relative_error
from toolkit.verification.compare.replay import Reference
from toolkit.verification.diagnose.attribution import Attribution, MicroGradients
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.experts import wrong_experts
from toolkit.verification.diagnose.layers import other_masks, wrong_layers
from toolkit.verification.diagnose.recompute import recomputed_otherwise
from toolkit.verification.diagnose.stages import wrong_stages
from toolkit.verification.passes import Pass

_EXPLAINED = 1e-3
"""Residual below which the weights explain the gradient; 16-bit rounding leaves more, no single cause less."""

_ROUNDED = 2e-2
"""What summing in bf16 (eps 2**-7) leaves at most of a right gradient; a few micro-batches leave less."""


def gradient_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """The likely cause, or None."""
    reference = found.reference
    assert reference is not None
    run = found.ranks[0].run
    step = measure.step
    weights, taken = run.weights_before(step), run.steps[step]
    right = found.replayed.gradients[step] if found.replayed else {}
    names = [name for name in taken.gradient if name in right]
    wrong = list(dict.fromkeys(m.name for m in stage.wrong if m.step == step))
    missing = [name for name in wrong if _is_nothing(taken.gradient.get(name))]
    if missing and len(missing) == len(wrong):
        return _no_gradient(missing, names, found, case)
    if (cause := wrong_layers(found, step, right)) is not None:
        return cause
    if (cause := wrong_stages(found, step, wrong)) is not None:
        return cause
    if (cause := wrong_experts(found, step, wrong, right)) is not None:
        return cause
    strangers = [name for name in wrong if name not in right]
    if strangers:
        if any(name in group for name in strangers for group in reference.tied):
            parts = [name for name in strangers if any(name in group for group in reference.tied)]
            return Diagnosis("tied-weights-separate", {"evidence": f"{parts[0]} has a gradient of its own"})
        return Diagnosis("frozen-weight-trains", {"first": strangers[0]})
    strange = [name for name in wrong if not bool(torch.isfinite(taken.gradient.get(name, torch.zeros(()))).all())]  # type: ignore[arg-type]
    if strange:
        plain = bool(torch.isfinite(right[strange[0]]).all())
        facts = {"count": len(strange), "first": strange[0]}
        return Diagnosis("gradient-not-finite" if plain else "plain-gradient-not-finite", facts)
    micros = MicroGradients(reference, step, weights)
    resolved = reference.resolved
    bound = max(_EXPLAINED, 2 * (stage.detection_limit or 0.0))
    fitted = micros.attribute(taken.gradient, names)
    if fitted.residual >= bound and (cause := _unreduced(micros, taken.gradient, wrong, names, resolved.data_size)):
        return cause
    if fitted.residual < bound:
        return by_weights(fitted, resolved.accumulation, resolved.data_size, resolved.mesh)
    right_ones = [m.name for m in stage.measures if m.kind == "gradient" and m.ok and m.step == step
                  and m.noise < NO_SIGNAL and m.name in right
                  and not _is_nothing(taken.gradient.get(m.name))]  # fmt: skip
    if cause := recomputed_otherwise(reference, step, weights, taken.gradient, wrong, right_ones):
        return cause
    # Rounding leaves the direction as it is and touches every tensor alike.
    # Other dropout masks would err by as much as a tenth.
    if not right_ones and fitted.residual < _ROUNDED and all(abs(w - 1) < _ROUNDED for w in fitted.weights if w == w):
        return Diagnosis("sums-rounded-to-16-bits", {"residual": fitted.residual})
    if (cause := other_masks(found)) is not None:
        return cause
    if _shares_masks(reference, step, weights, {name: taken.gradient[name] for name in wrong}, bound):
        return Diagnosis("dropout-mask-shared")
    if _redraws(found):
        return Diagnosis("dropout-mask-redrawn", {"count": len(wrong), "all": len(names)})
    if any(n in group for n in wrong for group in reference.tied):
        return Diagnosis("tied-weights-separate", {"evidence": f"{wrong[0]} lacks the other weight's gradient"})
    return None


def _is_nothing(gradient: torch.Tensor | None) -> bool:
    """Sharded engines give zeros where no gradient arrived."""
    return gradient is None or not bool(gradient.any())


def _shares_masks(
    reference: Reference,
    step: int,
    weights: dict[str, torch.Tensor],
    gradient: Mapping[str, torch.Tensor | None],
    bound: float,
) -> bool:
    """Whether the wrong tensors are right where every rank draws the first one's masks. Of an adapter, which adds
    nothing at first, no loss says so."""
    if reference.resolved.data_size == 1 or not reference.dropout_matters(step, weights):
        return False
    shared = reference.gradient_with_shared_masks(step, weights)
    return all(one is not None and relative_error(one, shared[name]) < bound for name, one in gradient.items())


def _redraws(found: Pass) -> bool:
    reference = found.reference
    assert reference is not None
    return reference.resolved.recipe.activation_checkpointing != "none" and reference.dropout_matters(
        0, found.ranks[0].run.weights
    )


def _no_gradient(missing: list[str], names: list[str], found: Pass, case: Case) -> Diagnosis:
    trains = set(found.ranks[0].trainable)
    if not any(name in trains for name in missing):
        return Diagnosis("tensors-do-not-train", {"count": len(missing), "first": missing[0]})
    checkpointed = case.recipe["activation_checkpointing"] != "none"
    facts = {"count": len(missing), "all": len(names), "first": missing[0]}
    return Diagnosis("reentrant-checkpointing" if checkpointed else "no-gradient", facts)


def _unreduced(
    micros: MicroGradients, gradient: dict[str, torch.Tensor | None], wrong: list[str], names: list[str], data_size: int
) -> Diagnosis | None:
    """Whether the wrong tensors each are one rank's own, or are so in the last micro-batch. Only most need to be: a
    shard's edge may cut through one."""
    each = {name: micros.attribute(gradient, [name]) for name in wrong if gradient.get(name) is not None}
    alone = {name: found for name, found in each.items() if found.residual < _EXPLAINED}
    most = max(1.0, 0.8 * len(wrong))
    own = [name for name, found in alone.items() if _is_one_rank(found, data_size)]
    if len(own) >= most:
        return Diagnosis("tensors-not-reduced", {"count": len(own), "all": len(names), "first": own[0]})
    last = [name for name, found in alone.items() if _last_is_one_rank(_known(found))]
    if len(last) >= most:
        return Diagnosis("last-micro-batch-not-reduced", _facts(alone[last[0]]))
    return None


def _known(found: Attribution) -> list[tuple[float, int, int, int]]:
    """Weight, tokens, rank and number of each micro-batch with tokens."""
    rows = zip(found.weights, found.tokens, found.places, strict=True)
    return [(w, t, rank, m) for w, t, (rank, m) in rows if t]


def _facts(found: Attribution) -> dict[str, str]:
    return {"weights": ", ".join(f"{w:.3g}" for w in found.weights if w == w)}


def _last_is_one_rank(pairs: list[tuple[float, int, int, int]]) -> bool:
    """Whether of the last micro-batch one rank's gradient is there and no other's, and all of the earlier ones'."""
    last = max(m for _, _, _, m in pairs)
    others = [w for w, _, _, m in pairs if m != last]
    there = [abs(w) >= 0.02 for w, _, _, m in pairs if m == last]
    return bool(others) and _near(others, 1.0) and sum(there) == 1 and len(there) > 1


def _is_one_rank(found: Attribution, data_size: int) -> bool:
    alone = [rank for rank in range(data_size) if _near(_of_rank(found, rank), None)]
    return len(alone) == 1 and all(
        abs(w) < 0.02 for w, (rank, _) in zip(found.weights, found.places, strict=True) if rank != alone[0] and w == w
    )


def _of_rank(found: Attribution, rank: int) -> list[float]:
    return [w for w, (at, _) in zip(found.weights, found.places, strict=True) if at == rank and w == w]


def _near(weights: list[float], value: float | None) -> bool:
    """All weights are ``value``, or with None all alike and not zero."""
    if not weights:
        return False
    aim = value if value is not None else sum(weights) / len(weights)
    return abs(aim) > 0.02 and all(abs(w - aim) <= 0.02 * max(1.0, abs(aim)) for w in weights)


def by_weights(found: Attribution, accumulation: int, world: int, mesh: Mesh | None = None) -> Diagnosis | None:
    """The cause that a pattern of weights has; None where all are right."""
    copies = mesh.replicate if mesh is not None and mesh.hybrid else 1
    known = [w for w in found.weights if w == w]
    facts = _facts(found)
    if _near(known, None):
        return _uniform(sum(known) / len(known), found, accumulation, world, copies, mesh)
    total = sum(found.tokens)
    count = sum(1 for _ in found.tokens)
    pairs = _known(found)
    last = max(m for _, _, _, m in pairs)
    if _match([(w, total / (t * count)) for w, t, _, _ in pairs]):
        return Diagnosis("mean-per-micro-batch", facts)
    per_rank = {rank: sum(t for _, t, r, _ in pairs if r == rank) for _, _, rank, _ in pairs}
    if _match([(w, total / (per_rank[rank] * world)) for w, _, rank, _ in pairs]):
        return Diagnosis("mean-per-rank", facts)
    if _match([(w, float(m == last)) for w, _, _, m in pairs]):
        return Diagnosis("only-last-micro-batch", facts)
    if mesh is not None and copies > 1:
        # One copy's ranks alone, averaged over them or divided by all.
        own = [(w, float(mesh.replica(rank) == 0)) for w, _, rank, _ in pairs]
        if _match(own) or _match([(w, one * copies) for w, one in own]):
            return Diagnosis("gradient-of-one-copy", facts)
    for rank in range(world):
        if _match([(w, float(r == rank) * world) for w, _, r, _ in pairs]) or _match(
            [(w, float(r == rank)) for w, _, r, _ in pairs]
        ):
            return Diagnosis("ranks-not-reduced", facts)
    if _last_is_one_rank(pairs):
        return Diagnosis("last-micro-batch-not-reduced", facts)
    return Diagnosis("micro-batch-weights", facts)


def _match(pairs: list[tuple[float, float]]) -> bool:
    return all(abs(seen - right) <= 0.02 * max(1.0, abs(right)) for seen, right in pairs)


def _uniform(
    factor: float, found: Attribution, accumulation: int, world: int, copies: int = 1, mesh: Mesh | None = None
) -> Diagnosis | None:
    tokens, micros = sum(found.tokens), max(m for _, m in found.places) + 1
    rows = [(65536.0, "loss-scale-left")]
    if accumulation > 1:
        rows += [(float(accumulation), "accumulation-summed"), (1 / accumulation, "accumulation-divided-twice")]
        if micros < accumulation:
            rows.insert(0, (micros / accumulation, "short-window-divided-by-full"))
    sharing = (
        {} if mesh is None else {mesh.context: "gradients-scaled-by-parts", mesh.tensor: "gradients-scaled-by-layers"}
    )
    for count, cause in sharing.items():
        rows += [(float(count), cause), (1 / count, cause)] if count > 1 else []
    if copies > 1:
        rows += [(float(copies), "gradients-of-copies-added"), (1 / copies, "gradients-of-copies-added")]
    if world > 1:
        rows += [
            (float(world), "ranks-summed"),
            (1 / world, "ranks-divided-twice"),
            (1 / math.sqrt(world), "shards-divided-by-root"),
        ]
    for value, cause in rows:
        if abs(factor - value) <= 2e-3 * value:
            return Diagnosis(cause, {"factor": factor})
    if factor >= 2.0**8 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-3:
        return Diagnosis("loss-scale-left", {"factor": factor})
    if 0.5 < factor < 1 and abs(tokens / factor - tokens - round(tokens / factor - tokens)) < 0.02 * tokens / 100:
        extra = round(tokens / factor - tokens)
        if extra == 0:
            return None  # right to the last token: the weights explain nothing
        facts = {"factor": factor, "tokens": tokens, "counted": tokens + extra}
        return Diagnosis("unpredicted-tokens-counted", facts)
    if abs(factor - 1) < 1e-3:
        return None
    return Diagnosis("uniform-scale", {"factor": factor})
