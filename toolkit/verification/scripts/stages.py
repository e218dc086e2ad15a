"""Forward and gradient of a recorded command against its replay, and the tolerances of both.

A call that is replayed with the same inputs, weights, random state and arithmetic answers with the same bits. Where
every output does, all that a right run may do otherwise is to sum in another order: over micro-batches, ranks and
buckets, which has a bound. Where outputs differ (another kernel, compiled code, a device whose kernels are not
deterministic), the tolerance is measured: what roundings of the input embedding change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from toolkit.reference.order import Order, summed_by_module
from toolkit.strategies import strategies
from toolkit.verification.compare.arithmetic import sum_bound
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import NO_SIGNAL, SAFETY, Noise, relative_error
from toolkit.verification.scripts.facts import UnitTrace
from toolkit.verification.scripts.replay import Contribution, Replay, Tensors

PERTURBED = 4
"""Perturbed replays of each step."""

_OUTPUT = "a model's output"


@dataclass
class Replayed:
    """By step: every call's contribution, the gradient that they sum to, and how far another order of the sum can be
    from it, relative. ``exact``: every replayed output was equal to the recorded one, bit by bit."""

    contributions: list[list[Contribution]]
    gradients: list[Tensors]
    bounds: list[dict[str, float]]
    noise: Noise
    exact: bool = True
    reordered: dict[str, float] = field(default_factory=dict)
    """Of correct runs that compute a micro-batch in the strategy's order, the largest distance, relative."""


def replay_all(replay: Replay, models: int = 1) -> Replayed:
    """Replay every step that was not skipped, and measure what correct runs differ by. ``models``: of the verdict."""
    steps = replay.ranks[0].trace.run.steps
    found = Replayed([], [], [], Noise())
    for step in steps:
        contributions = replay.contributions(step.step)
        right = replay.summed(contributions, step.step)
        found.contributions.append(contributions)
        found.gradients.append(right)
        found.bounds.append(_bounds(replay, contributions, right, step.step))
        if step.skipped:
            continue
        exact = all(error == 0.0 for one in contributions for error in one.outputs.values())
        found.exact = found.exact and exact
        strategy = strategies().get(replay.ranks[0].facts.strategy)
        if strategy is not None and strategy.traits.sums_input_gradients_by_module:
            with summed_by_module(replay.model, Order(by_module=True)):
                _reorder(found, right, replay.summed(replay.contributions(step.step, losses=False), step.step))
        if replay.device.type != "cpu":  # its kernels may add in another order every time
            _reorder(found, right, replay.summed(replay.contributions(step.step, losses=False), step.step))
        if not exact:
            _perturb(found, replay, right, step.step)
    compared = sum(len(g) + sum(len(one.outputs) for one in all_of)
                   for g, all_of in zip(found.gradients, found.contributions, strict=True))  # fmt: skip
    found.noise.comparisons = max(1, models * compared)
    return found


def _perturb(found: Replayed, replay: Replay, right: Tensors, step: int) -> None:
    draw = random.Random(step)
    for seed in range(PERTURBED):
        with replay.perturbed(PERTURBED * step + seed):
            shaken = replay.contributions(step, losses=False)
        draw.shuffle(shaken)
        off = (e for one in shaken for e in one.outputs.values() if e != math.inf)
        # Its own distance from the replayed outputs, and that of the recorded ones.
        found.noise.arranged[_OUTPUT].add(max(off, default=0.0), 0.0)
        other = replay.summed(shaken, step, by_rank=bool(seed % 2))
        for name, gradient in right.items():
            error = relative_error(other[name], gradient)
            if error != math.inf:
                found.noise.arranged[name].add(error, (other[name].double() - gradient.double()).norm().item())


def _reorder(found: Replayed, right: Tensors, other: Tensors) -> None:
    for name, gradient in right.items():
        error = relative_error(other[name], gradient)
        if error != math.inf:
            found.reordered[name] = max(found.reordered.get(name, 0.0), error)


def _bounds(replay: Replay, contributions: Sequence[Contribution], right: Tensors, step: int) -> dict[str, float]:
    found = {}
    for name, gradient in right.items():
        sizes = [one.gradients[name].double().abs() for one in contributions if name in one.gradients]
        total = torch.stack(sizes).sum(0).norm().item() / replay.scale(step)
        found[name] = sum_bound(len(sizes), total, gradient)
    return found


def forward(ranks: Sequence[UnitTrace], first: Tensors, replayed: Replayed) -> Stage:
    """The first weights, and the outputs that a gradient reached."""
    stage = Stage("forward")
    if not ranks[0].facts.loaded and not ranks[0].facts.after:
        for name, seen in ranks[0].trace.run.weights.items():
            if name in first:
                error = relative_error(seen, first[name])
                stage.measures.append(Measure("initial-weight", 0, error, 0.0, name))
    noise, chance = replayed.noise.of(_OUTPUT), 0.0 if replayed.exact else replayed.noise.chance
    tolerance = 0.0 if replayed.exact else replayed.noise.tolerance(_OUTPUT)
    for step, contributions in enumerate(replayed.contributions):
        for one in contributions:
            for name, error in one.outputs.items():
                stage.measures.append(
                    Measure("output", step, error, tolerance, name, noise, one.micro, one.rank, chance=chance)
                )
    stage.detection_limit = tolerance
    stage.summary = "outputs bit-equal" if replayed.exact else ""
    return stage


def gradient(ranks: Sequence[UnitTrace], replayed: Replayed) -> Stage:
    """Every trained parameter's whole gradient, averaged and unscaled, before clipping."""
    stage = Stage("gradient")
    run, facts = ranks[0].trace.run, ranks[0].facts
    signal: set[str] = set()
    outside = set(facts.outside)
    for taken, right, bounds in zip(run.steps, replayed.gradients, replayed.bounds, strict=True):
        if taken.skipped:
            continue
        for name in run.weights:
            if name in outside:
                continue
            seen, expected = taken.gradient.get(name), right.get(name)
            size = expected.double().norm().item() if expected is not None else 0.0
            bound = bounds.get(name, 0.0)
            reordered = replayed.reordered.get(name, 0.0)
            noise, tolerance, chance = max(bound, reordered), bound + SAFETY * reordered, 0.0
            if not replayed.exact:
                noise = max(noise, replayed.noise.of(name, size))
                tolerance = max(tolerance, replayed.noise.tolerance(name, size))
                chance = replayed.noise.chance
            kind = "gradient"
            if seen is None or expected is None:
                other = seen if seen is not None else expected
                # No gradient and a gradient of zeros mean the same step.
                error = float(other is not None and bool(other.any()))
                kind = "gradient-missing" if seen is None else "gradient-unexpected"
            else:
                error = relative_error(seen, expected)
            if size > 0 and noise < NO_SIGNAL:
                signal.add(name)
            stage.measures.append(Measure(kind, taken.step, error, tolerance, name, noise, chance=chance))
    stage.detection_limit = max(
        (m.tolerance for m in stage.measures if m.kind == "gradient" and m.name in signal and m.noise < NO_SIGNAL),
        default=None,
    )
    silent = len(run.weights) - len(signal) - len(outside)
    stage.summary = f"{silent} tensors without signal" if silent else ""
    return stage
