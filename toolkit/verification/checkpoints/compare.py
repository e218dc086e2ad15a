"""Two checkpoints of one step, stage by stage: step, names, weights, moments, learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from toolkit.verification.checkpoints.contents import HALF, MOMENTS, Checkpoint, StoredTensor
from toolkit.verification.checkpoints.sizes import Sizes, largest_spread, measured, precision, relative, summary
from toolkit.verification.checkpoints.tolerance import STEPS as MEASURED
from toolkit.verification.checkpoints.tolerance import WEAK, Tolerance
from toolkit.verification.compare.measure import Measure, Stage

STAGES = ("step", "names", "weights", "optimizer-state", "schedule")
"""In the order in which they are compared. The first that fails is reported."""


@dataclass
class Compared:
    """One step of both. ``weights``, ``moments``: sizes by name, for diagnoses."""

    a: Checkpoint
    b: Checkpoint
    compute: str
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: dict[str, Sizes] = field(default_factory=dict)
    moments: dict[str, dict[str, Sizes]] = field(default_factory=lambda: {moment: {} for moment in MOMENTS})
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        return self.a.step if self.a.step is not None else self.b.step

    @property
    def different(self) -> tuple[Stage, Measure] | None:
        """The first stage that fails, and its worst tensor."""
        return next(iter(self.differences), None)

    @property
    def differences(self) -> list[tuple[Stage, Measure]]:
        """Every stage that fails, in the order of ``STAGES``, and its worst tensor."""
        return [(stage, first) for stage in self.stages if (first := stage.first_wrong) is not None]

    def limits(self, stage: Stage) -> dict[str, float]:
        """By tensor, the relative error of its gradient from which on one of its moments is beyond its tolerance."""
        found: dict[str, float] = {}
        for measure in stage.measures:
            if measure.kind == "moment":
                limit = measure.tolerance / (2.0 if measure.facts["moment"] == "exp_avg_sq" else 1.0)
                found[measure.name] = min(limit, found.get(measure.name, limit))
        return found

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def bit_equal(self) -> bool:
        """Whether every tensor that was compared has the same bits on both sides."""
        sizes = [*self.weights.values(), *(one for found in self.moments.values() for one in found.values())]
        return bool(sizes) and all(one.difference == 0.0 for one in sizes)


def compare(a: Checkpoint, b: Checkpoint, override: float | None = None) -> Compared:
    """Compare all that both have. ``override``: one relative tolerance instead of the measured ones.

    Two tensors are in memory at a time. Raises InputError where a tensor cannot be read.
    """
    compute = _compute(a, b)
    found = Compared(a, b, compute)
    tolerance = Tolerance(found.step, compute, override)
    at = (found.step or 1) - 1
    steps, names = _steps(found, at), _names(found, at)
    moments = _moments(found, tolerance, at)  # before the weights: which of them hardly have a gradient
    found.stages = [steps, names, _weights(found, tolerance, at), moments, _schedule(found, at)]
    if a.compute and b.compute and a.compute != b.compute:
        found.notes.append(f"A computes in {a.compute}, B in {b.compute}: tolerances are those of {compute}")
    if tolerance.extrapolated:
        found.notes.append(
            f"tolerances were measured up to step {MEASURED[-1]} and are extrapolated to step {found.step}; "
            "set --tolerance for your own"
        )
    return found


def _compute(a: Checkpoint, b: Checkpoint) -> str:
    """The dtype of the forward pass, the coarser one where the two differ: correct runs differ by its rounding."""
    known = {one.compute or one.half for one in (a, b)}
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in known), "float32")


def _steps(found: Compared, at: int) -> Stage:
    stage = Stage("step")
    a, b = found.a.step, found.b.step
    if a is None or b is None:
        unknown = " and ".join(str(one.path) for one in (found.a, found.b) if one.step is None)
        found.notes.append(f"{unknown}: the number of optimizer steps is not known; it is not compared")
        stage.summary = "not known"
        return stage
    stage.measures.append(Measure("optimizer-steps", at, float(abs(a - b)), 0.0, facts={"a": a, "b": b}))
    stage.summary = f"{a} optimizer steps"
    return stage


def _names(found: Compared, at: int) -> Stage:
    a, b = found.a, found.b
    found.only_a, found.only_b = (missing(one, other, found.notes) for one, other in ((a, b), (b, a)))
    stage = Stage("names")
    for names, where in ((found.only_a, "A"), (found.only_b, "B")):
        stage.measures += [Measure("tensor-alone", at, 1.0, 0.0, name, facts={"where": where}) for name in names]
    for name in _in_order(found, a.weights.keys() & b.weights.keys()):
        here, there = a.weights[name].shape, b.weights[name].shape
        same = here == there
        facts = {"a": list(here), "b": list(there)}
        stage.measures.append(Measure("tensor-shape", at, float(not same), 0.0, name, facts=facts))
        if not same:
            found.reshaped.append(name)
    found.reshaped.sort()
    stage.summary = f"{len(a.weights.keys() & b.weights.keys())} tensors"
    return stage


def _pairs(
    found: Compared, a: dict[str, StoredTensor], b: dict[str, StoredTensor], *, rounded: bool = False
) -> Iterator[tuple[str, Sizes]]:
    for name in _in_order(found, a.keys() & b.keys()):
        if a[name].shape == b[name].shape:
            yield name, measured(a[name], b[name], rounded)


def _in_order(found: Compared, names: set[str]) -> list[str]:
    order = {name: at for at, name in enumerate(found.a.order or found.b.order)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _weights(found: Compared, tolerance: Tolerance, at: int) -> Stage:
    stage = Stage("weights")
    a, b = found.a, found.b
    peaks = [peak for peak in (a.peak, b.peak) if peak]
    moved = max(peaks) * found.step if peaks and found.step else None
    rounded = [one.half for one in (a, b) if one.half]
    if len(rounded) == 1:
        where = a if a.half else b
        found.notes.append(f"{where.path} has {rounded[0]} weights only: weights are compared at that precision")
    half = HALF[rounded[0]] if rounded else None
    weak = _weak(found)
    for name, sizes in _pairs(found, a.weights, b.weights, rounded=True):
        found.weights[name] = sizes
        allowed = tolerance.weight(sizes, moved, name in weak, half)
        share = sizes.difference / (moved * math.sqrt(sizes.elements)) if moved and sizes.elements else None
        kind = "stored-weight" if share is None else "stored-weight-moved"
        stage.measures.append(
            Measure(kind, at, relative(sizes), allowed, name, facts={} if share is None else {"share": share})
        )
    stage.summary = summary(found.weights)
    stage.detection_limit = max((m.tolerance for m in stage.measures), default=None)
    return stage


def _moments(found: Compared, tolerance: Tolerance, at: int) -> Stage:
    stage = Stage("optimizer-state")
    a, b = found.a, found.b
    if not (a.has_moments and b.has_moments):
        lacking = " and ".join(str(one.path) for one in (a, b) if not one.has_moments)
        found.notes.append(
            f"{lacking}: no moments: AdamW hides a wrong scale of gradients, and weights alone do not show it"
        )
        stage.summary = "not compared"
        return stage
    precisions = {"a": precision(a), "b": precision(b)}
    if set(precisions.values()) & set(HALF):
        same = precisions["a"] == precisions["b"]
        stage.measures.append(Measure("moment-precision", at, float(not same), 0.0, facts=precisions))
    for moment in MOMENTS:
        here, there = a.moments[moment], b.moments[moment]
        for name, sizes in _pairs(found, here, there):
            found.moments[moment][name] = sizes
        largest = largest_spread(found.moments[moment])
        for name, sizes in found.moments[moment].items():
            allowed = tolerance.moment(moment, sizes, largest)
            facts = {"moment": moment, "factor": sizes.factor}
            stage.measures.append(Measure("moment", at, relative(sizes), allowed, name, facts=facts))
    for moment in MOMENTS:
        for name in sorted(a.moments[moment].keys() ^ b.moments[moment].keys()):
            if name in a.weights and name in b.weights:
                where = "A" if name in a.moments[moment] else "B"
                stage.measures.append(
                    Measure("moment-alone", at, 1.0, 0.0, name, facts={"moment": moment, "where": where})
                )
    stage.summary = summary({f"{m}.{n}": s for m, one in found.moments.items() for n, s in one.items()})
    limits = found.limits(stage)
    stage.detection_limit = max(limits.values(), default=None)
    return stage


def _weak(found: Compared) -> set[str]:
    """Tensors with hardly a gradient, of whose updates rounding decides the sign."""
    spread = {name: one.b / math.sqrt(max(1, one.elements)) for name, one in found.moments["exp_avg"].items()}
    largest = max(spread.values(), default=0.0)
    return {name for name, one in spread.items() if one < WEAK * largest}


def _schedule(found: Compared, at: int) -> Stage:
    stage = Stage("schedule")
    a, b = (sorted(set(one.learning_rate)) for one in (found.a, found.b))
    if not a or not b:
        unknown = " and ".join(str(one.path) for one in (found.a, found.b) if not one.learning_rate)
        found.notes.append(f"{unknown}: the learning rate is not known; it is not compared")
        stage.summary = "not known"
        return stage
    facts = {"a": _rates(a), "b": _rates(b)}
    off = abs(a[-1] - b[-1]) / max(a[-1], b[-1]) if max(a[-1], b[-1]) > 0 else 0.0
    if len(a) > 1 and len(b) > 1:
        off = max([off, *(abs(x - y) / max(x, y) for x, y in zip(a, b, strict=False) if max(x, y) > 0)])
    stage.measures.append(Measure("stored-learning-rate", at, off, 1e-6, facts=facts))
    stage.summary = f"learning rate {facts['a']}"
    return stage


def _rates(rates: list[float]) -> str:
    return " and ".join(f"{rate:.6g}" for rate in rates)


def missing(one: Checkpoint, other: Checkpoint, notes: list[str]) -> list[str]:
    """Names of ``one`` that ``other`` lacks and should have.

    Copies of tied weights are not missing, and neither are frozen weights where ``other`` keeps what trains; ``notes``
    is reported of both. Moments that are kept under the name of a copy get the name that both sides have.
    """
    names = sorted(one.weights.keys() - other.weights.keys())
    if other.trained_only and names:
        trained = {name for tensors in one.moments.values() for name in tensors}
        frozen = [name for name in names if name not in trained]
        if frozen:
            why = "do not train" if trained else "may be frozen: no moments say that they train"
            notes.append(
                f"{len(frozen)} tensors are in {one.path} alone, and {why}; {other.path} has trained ones only"
            )
        names = [name for name in names if name in trained]
    kept = []
    for name in names:
        twin = _tied_to(one, name, other)
        if twin is None:
            kept.append(name)
            continue
        notes.append(f"{name} is {twin} under another name (tied); {other.path} has it once")
        for tensors in one.moments.values():
            if name in tensors:
                tensors.setdefault(twin, tensors[name])
                del tensors[name]
    return kept


def _tied_to(one: Checkpoint, name: str, other: Checkpoint) -> str | None:
    """A tensor of both sides with the same shape and bits as ``name``: an embedding and the output layer, tied."""
    stored = one.weights[name]
    if len(stored.shape) != 2:
        return None
    same = (n for n, t in one.weights.items() if n != name and n in other.weights and t.shape == stored.shape)
    return next((twin for twin in same if torch.equal(one.weights[twin].read(), stored.read())), None)
