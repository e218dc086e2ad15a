"""Forward and gradient of a recorded command against its replay, and the tolerances of both.

A call that is replayed with the same inputs, weights, random state and arithmetic answers with the same bits. Where
every output does, all that a right run may do otherwise is to sum in another order: over micro-batches, ranks and
buckets. Where outputs differ (another kernel, compiled code, a device whose kernels are not deterministic), the
tolerance is what a rounding of the input embedding changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from toolkit.reference.order import Order, summed_by_module
from toolkit.strategies import strategies
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import NO_SIGNAL, SAFETY
from toolkit.verification.scripts.facts import UnitTrace
from toolkit.verification.scripts.replay import Contribution, Replay, Tensors


@dataclass
class Spread:
    """By how much correct gradients of a tensor differ, relative in the 2-norm, pooled over steps; ``outputs``: of the
    model's answers."""

    exact: bool = True
    """Whether every replayed output was equal to the recorded one, bit by bit."""
    relative: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    absolute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    outputs: float = 0.0

    def of(self, name: str, size: float, eps: float) -> float:
        """The noise of a gradient of this 2-norm, in a dtype whose roundings are ``eps``."""
        shared = self.absolute.get(name, 0.0) / size if size > 0 else 0.0
        return max(self.relative.get(name, 0.0), shared, eps)


@dataclass
class Replayed:
    """By step: every call's contribution and the gradient that they sum to."""

    contributions: list[list[Contribution]]
    gradients: list[Tensors]
    spread: Spread


def replay_all(replay: Replay) -> Replayed:
    """Replay every step that was not skipped, and measure what correct runs differ by."""
    found = Replayed([], [], Spread())
    for step in replay.ranks[0].trace.run.steps:
        contributions = replay.contributions(step.step)
        right = replay.summed(contributions, step.step)
        found.contributions.append(contributions)
        found.gradients.append(right)
        if step.skipped:
            continue
        exact = all(error == 0.0 for one in contributions for error in one.outputs.values())
        found.spread.exact = found.spread.exact and exact
        others = [
            replay.summed(contributions[::-1], step.step),
            replay.summed(contributions, step.step, by_rank=False),
        ]
        strategy = strategies().get(replay.ranks[0].facts.strategy)
        if strategy is not None and strategy.traits.sums_input_gradients_by_module:
            with summed_by_module(replay.model, Order(by_module=True)):
                others.append(replay.summed(replay.contributions(step.step, losses=False), step.step))
        if replay.device.type != "cpu":  # its kernels may add in another order every time
            others.append(replay.summed(replay.contributions(step.step, losses=False), step.step))
        if not exact:
            with replay.perturbed():
                shaken = replay.contributions(step.step, losses=False)
            others.append(replay.summed(shaken, step.step))
            found.spread.outputs = max(found.spread.outputs, _outputs(contributions, shaken))
        for other in others:
            _differ(found.spread, right, other)
    return found


def forward(ranks: Sequence[UnitTrace], first: Tensors, replayed: Replayed) -> Stage:
    """The first weights, and the outputs that a gradient reached."""
    stage = Stage("forward")
    if not ranks[0].facts.loaded and not ranks[0].facts.after:
        for name, seen in ranks[0].trace.run.weights.items():
            if name in first:
                error = _relative(seen, first[name])
                stage.measures.append(Measure("initial-weight", 0, error, 0.0, name))
    tolerance = 0.0 if replayed.spread.exact else SAFETY * replayed.spread.outputs
    for step, contributions in enumerate(replayed.contributions):
        for one in contributions:
            for name, error in one.outputs.items():
                stage.measures.append(
                    Measure("output", step, error, tolerance, name, replayed.spread.outputs, one.micro, one.rank)
                )
    stage.detection_limit = tolerance
    stage.summary = "outputs bit-equal" if replayed.spread.exact else ""
    return stage


def gradient(ranks: Sequence[UnitTrace], replayed: Replayed) -> Stage:
    """Every trained parameter's whole gradient, averaged and unscaled, before clipping."""
    stage = Stage("gradient")
    run, facts = ranks[0].trace.run, ranks[0].facts
    signal: set[str] = set()
    outside = set(facts.outside)
    for taken, right in zip(run.steps, replayed.gradients, strict=True):
        if taken.skipped:
            continue
        for name in run.weights:
            if name in outside:
                continue
            seen, expected = taken.gradient.get(name), right.get(name)
            size = expected.double().norm().item() if expected is not None else 0.0
            noise = replayed.spread.of(name, size, torch.finfo(run.weights[name].dtype).eps)
            kind = "gradient"
            if seen is None or expected is None:
                other = seen if seen is not None else expected
                # No gradient and a gradient of zeros mean the same step.
                error = float(other is not None and bool(other.any()))
                kind = "gradient-missing" if seen is None else "gradient-unexpected"
            else:
                error = _relative(seen, expected)
            if size > 0 and noise < NO_SIGNAL:
                signal.add(name)
            stage.measures.append(Measure(kind, taken.step, error, SAFETY * noise, name, noise))
    stage.detection_limit = max(
        (m.tolerance for m in stage.measures if m.kind == "gradient" and m.name in signal and m.noise < NO_SIGNAL),
        default=None,
    )
    silent = len(run.weights) - len(signal) - len(outside)
    stage.summary = f"{silent} tensors without signal" if silent else ""
    return stage


def _relative(seen: torch.Tensor, right: torch.Tensor) -> float:
    difference = (seen.double() - right.double()).norm().item()
    if difference == 0.0:
        return 0.0
    size = right.double().norm().item()
    return difference / size if size > 0 else math.inf


def _differ(spread: Spread, right: Tensors, other: Tensors) -> None:
    for name, gradient in right.items():
        apart = (other[name].double() - gradient.double()).norm().item()
        spread.absolute[name] = max(spread.absolute[name], apart)
        error = _relative(other[name], gradient)
        if error != math.inf:
            spread.relative[name] = max(spread.relative[name], error)


def _outputs(plain: Sequence[Contribution], shaken: Sequence[Contribution]) -> float:
    """How far outputs of the perturbed model are from the recorded ones: its own distance and the replayed one's."""
    return max((e for one in shaken for e in one.outputs.values() if e != math.inf), default=0.0)
