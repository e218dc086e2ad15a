"""From what differs between two checkpoints to a likely cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from toolkit.verification.checkpoints.compare import Compared
from toolkit.verification.checkpoints.contents import HALF, MOMENTS
from toolkit.verification.checkpoints.sizes import largest_spread, relative
from toolkit.verification.checkpoints.tolerance import Tolerance
from toolkit.verification.diagnose.diagnosis import Diagnosis

ALIKE = 0.02
"""Factors of tensors are alike within this share of the factor's distance from 1, or of 1 (bf16: 2 % of a moment)."""


def diagnose(found: Compared) -> Diagnosis | None:
    """The cause that the first difference points to; None where no known one fits. Reads single tensors again."""
    different = found.different
    if different is None:
        return None
    stage = different[0].name
    if stage == "step":
        return _other_step(found)
    if stage == "names":
        return _padded(found) or _untied(found) or _missing(found)
    rules: tuple[Callable[[Compared], Diagnosis | None], ...] = (
        _half_moments, _scaled, _never_trained, _decay, _sixteen_bits, _later_weights, _moments_alone,
    )  # fmt: skip
    if stage == "schedule":
        rules = (_rate,)
    return next((cause for rule in rules if (cause := rule(found)) is not None), None)


def _wrong(found: Compared, stage: str, **facts: Any) -> list[str]:
    """Names of tensors that differ in a stage, in its order."""
    wrong = [m for m in found.stage(stage).wrong if all(m.facts.get(key) == value for key, value in facts.items())]
    return [m.name for m in wrong]


def _other_step(found: Compared) -> Diagnosis:
    facts = {"a": found.a.step, "b": found.b.step}
    return Diagnosis("other-step-count", facts)


def _padded(found: Compared) -> Diagnosis | None:
    """Embeddings with more rows on one side, and the same values in those that both have."""
    if not found.reshaped or found.only_a or found.only_b:
        return None
    rows = set()
    for name in found.reshaped:
        a, b = found.a.weights[name], found.b.weights[name]
        if a.shape[1:] != b.shape[1:] or len(a.shape) < 1:
            return None
        common = min(a.shape[0], b.shape[0])
        left, right = a.read()[:common].double(), b.read()[:common].double()
        if (left - right).norm() > 1e-2 * left.norm():
            return None
        rows.add((a.shape[0], b.shape[0]))
    if len(rows) != 1:
        return None
    ((a_rows, b_rows),) = rows
    return Diagnosis("embeddings-padded", {"a": a_rows, "b": b_rows, "first": found.reshaped[0]})


def _untied(found: Compared) -> Diagnosis | None:
    alone = [*found.only_a, *found.only_b]
    if len(alone) != 1 or found.reshaped:
        return None
    (name,) = alone
    one, which = (found.a, "A") if found.only_a else (found.b, "B")
    shape = one.weights[name].shape
    twins = [
        other for other, stored in one.weights.items() if other != name and stored.shape == shape and "embed" in other
    ]
    if "head" not in name or not twins:
        return None
    return Diagnosis("embeddings-untied", {"which": which, "first": name, "other": twins[0]})


def _missing(found: Compared) -> Diagnosis | None:
    for alone, lacks in ((found.only_a, "B"), (found.only_b, "A")):
        adapters = [name for name in alone if "lora_" in name or "adapter" in name]
        if adapters:
            return Diagnosis("adapters-missing", {"count": len(adapters), "which": lacks, "first": adapters[0]})
        if alone:
            return Diagnosis("tensors-missing", {"count": len(alone), "which": lacks, "first": alone[0]})
    return None


def _alike(values: Iterable[float]) -> float | None:
    """The value that all have, within ``ALIKE``."""
    numbers = [value for value in values if value == value]
    if not numbers:
        return None
    middle = median(numbers)
    near = ALIKE * max(abs(middle - 1.0), abs(middle))
    return middle if all(abs(value - middle) <= near for value in numbers) else None


def _scaled(found: Compared) -> Diagnosis | None:
    """First moments times c, second times c²."""
    first = {name: one for name, one in found.moments["exp_avg"].items() if one.a > 0 and one.b > 0}
    second = {name: one for name, one in found.moments["exp_avg_sq"].items() if one.a > 0 and one.b > 0}
    if len(first) < 2 or not _wrong(found, "optimizer-state"):
        return None
    if found.compute != "float32":  # weak tensors are mostly rounding
        largest = max(one.b / math.sqrt(one.elements) for one in first.values())
        first = {name: one for name, one in first.items() if one.b / math.sqrt(one.elements) > 1e-2 * largest}
        second = {name: second[name] for name in first if name in second}
    c, square = _alike(one.factor for one in first.values()), _alike(one.factor for one in second.values())
    if c is None or square is None or c <= 0 or abs(c - 1) < ALIKE or abs(square - c * c) > 2 * ALIKE * c * c:
        return None
    return Diagnosis("moments-scaled", {"factor": c, "square": square, "count": len(first)})


def _never_trained(found: Compared) -> Diagnosis | None:
    """Moments that are all zero, or absent, on one side alone."""
    for which in ("A", "B"):
        zero = []
        for name, one in found.moments["exp_avg"].items():
            here, there = (one.a, one.b) if which == "A" else (one.b, one.a)
            if here == 0.0 and there > 0.0:
                zero.append(name)
        absent = _wrong(found, "optimizer-state", where="B" if which == "A" else "A", moment="exp_avg")
        names = [*zero, *absent]
        if names:
            how = "all zero" if zero else "absent"
            facts = {"count": len(names), "which": which, "first": names[0], "how": how}
            return Diagnosis("tensor-never-trained", facts)
    return None


def _half_moments(found: Compared) -> Diagnosis | None:
    wrong = [m for m in found.stage("optimizer-state").wrong if m.kind == "moment-precision"]
    if not wrong:
        return None
    a, b = wrong[0].facts["a"], wrong[0].facts["b"]
    half = "A" if a in HALF else "B"
    return Diagnosis("stored-moments-in-16-bits", {"which": half, "dtype": a if half == "A" else b})


def _decay(found: Compared) -> Diagnosis | None:
    """Weights shrunk by one factor in the tensors that decay, and in no other."""
    if not _wrong(found, "weights"):
        return None
    a, b = found.a.decay, found.b.decay
    known = {name: (a[name], b[name]) for name in a.keys() & b.keys()}
    changed = {pair for pair in known.values() if pair[0] != pair[1]}
    if len(changed) == 1:
        ((before, after),) = changed
        return Diagnosis(
            "weight-decay-differs", {"evidence": f"the optimizers' groups say {before:g} in A, {after:g} in B"}
        )
    matrices = {n: 1 - s.factor for n, s in found.weights.items() if _wide(found, n)}
    others = [abs(1 - s.factor) for n, s in found.weights.items() if not _wide(found, n)]
    if len(matrices) < 2:
        return None
    shrunk = median(matrices.values())
    alike = all(abs(one - shrunk) < 0.2 * abs(shrunk) for one in matrices.values())
    left = all(found.weights[name].beyond_factor < 0.2 * abs(shrunk) for name in matrices)
    if shrunk == 0.0 or not alike or not left or any(one > 0.2 * abs(shrunk) for one in others):
        return None
    which = "B" if shrunk > 0 else "A"
    evidence = f"{len(matrices)} matrices of {which} are {abs(shrunk):.2e} smaller, the other tensors are not"
    return Diagnosis("weight-decay-differs", {"evidence": evidence})


def _wide(found: Compared, name: str) -> bool:
    return len(found.a.weights[name].shape) > 1


def _sixteen_bits(found: Compared) -> Diagnosis | None:
    """Nearly all moments differ, by no more than a forward pass in bf16 explains, and no file says in which it ran."""
    if found.a.compute is not None or found.b.compute is not None:
        return None
    stage = found.stage("optimizer-state")
    errors = [measure.error for measure in stage.measures if measure.kind == "moment"]
    if not errors or len(stage.wrong) < 0.9 * len(errors) or median(errors) < 1e-4:
        return None
    half = Tolerance(found.step, "bfloat16")
    largest = {moment: largest_spread(sizes) for moment, sizes in found.moments.items()}
    within = all(
        relative(one) <= half.moment(moment, one, largest[moment])
        for moment, sizes in found.moments.items()
        for one in sizes.values()
    )
    return Diagnosis("sixteen-bits-not-said", {"tolerance": 1.2 * max(errors)}) if within else None


def _later_weights(found: Compared) -> Diagnosis | None:
    """Moments agree, and weights differ along AdamW's own update: they are of a later step than the moments."""
    wrong = _wrong(found, "weights")
    if not wrong or not found.moments["exp_avg"] or _wrong(found, "optimizer-state"):
        return None
    cosines = [cosine for name in wrong if (cosine := _along_update(found, name)) is not None]
    if not cosines or min(map(abs, cosines)) < 0.5 or (min(cosines) < 0 < max(cosines)):
        return None
    which = "B" if cosines[0] > 0 else "A"
    return Diagnosis(
        "weights-of-later-step", {"which": which, "count": len(wrong), "cosine": median(map(abs, cosines))}
    )


def _along_update(found: Compared, name: str) -> float | None:
    """The cosine between B's weight minus A's and AdamW's last update."""
    if any(name not in found.a.moments[moment] for moment in MOMENTS):
        return None
    first, second = (found.a.moments[moment][name].read().double() for moment in MOMENTS)
    update = -first / (second.sqrt() + 1e-12)
    moved = found.b.weights[name].read().double() - found.a.weights[name].read().double()
    size = (update.norm() * moved.norm()).item()
    return (update * moved).sum().item() / size if size > 0 else None


def _moments_alone(found: Compared) -> Diagnosis | None:
    moments, weights = _wrong(found, "optimizer-state"), _wrong(found, "weights")
    if moments and not weights:
        facts = {"count": len(set(moments)), "all": len(found.moments["exp_avg"]), "first": moments[0]}
        equal = all(one.difference == 0.0 for one in found.weights.values())
        return Diagnosis("moments-differ-alone", facts | {"how": "bit for bit equal" if equal else "within tolerance"})
    if weights and not moments and found.moments["exp_avg"]:
        return Diagnosis(
            "weights-differ-alone", {"count": len(weights), "all": len(found.weights), "first": weights[0]}
        )
    return None


def _rate(found: Compared) -> Diagnosis:
    (measure,) = found.stage("schedule").wrong
    return Diagnosis("stored-rate-differs", {"a": measure.facts["a"], "b": measure.facts["b"]})
