"""Forward and gradient of a recorded command against its replay, and the tolerances of both.

A call that is replayed with the same inputs, weights, random state and arithmetic answers with the same bits. Where
every output does, all that a right run may do otherwise is to sum in another order: over micro-batches, ranks and
buckets, which has a bound. Where outputs differ (another kernel, compiled code, a device whose kernels are not
deterministic), the tolerance is measured: what roundings of the input embedding change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.reference.order import Order, summed_by_module
from toolkit.strategies import strategies
from toolkit.verification.compare.arithmetic import sum_bound
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import NO_SIGNAL, SAFETY, Noise
from toolkit.verification.scripts.facts import UnitTrace
from toolkit.verification.scripts.replay import Contribution, Replay, StepGradient, Summing, Tensors
from toolkit.verification.scripts.sketch import BUCKETS, NORM_SLACK, distance, norm, sketch

PERTURBED = 4
"""Perturbed replays of each step."""

_OUTPUT = "a model's output"


@dataclass
class Replayed:
    """By step: every call's contribution, the sketches of the gradient that they sum to, and how far another order of
    the sum can be from it, relative. ``exact``: every replayed output was equal to the recorded one, bit by bit.
    ``by_labels``: the gradient at the outputs was computed from labels, which rounds."""

    contributions: list[list[Contribution]]
    gradients: list[Tensors]
    bounds: list[dict[str, float]]
    noise: Noise
    exact: bool = True
    by_labels: bool = False
    reordered: dict[str, float] = field(default_factory=dict)
    """Of correct runs that compute a micro-batch in the strategy's order, or its loss in the other right way, the
    largest distance, relative."""

    @property
    def measured_because(self) -> str | None:
        """Why the gradient's tolerances are measured; None where only the order of its sums may differ."""
        if self.by_labels:
            return "the loop is not this toolkit's"
        return None if self.exact else "outputs differ from the recorded ones by a rounding"


def replay_all(replay: Replay, models: int = 1, say: Callable[[str], None] = lambda text: None) -> Replayed:
    """Replay every step that was not skipped, and measure what correct runs differ by. ``models``: of the verdict.
    ``say``: is told which step it is."""
    steps = replay.ranks[0].trace.run.steps
    found = Replayed([], [], [], Noise(), by_labels=replay.tokens is not None)
    for step in steps:
        say(f"computing recorded step {step.step + 1} of {len(steps)} in a plain loop")
        replayed = replay.gradient(step.step)
        right = {name: sketch(gradient) for name, gradient in replayed.total.items()}
        found.contributions.append(replayed.calls)
        found.gradients.append(right)
        found.bounds.append(_bounds(replay, replayed, step.step))
        exact = all(error == 0.0 for one in replayed.calls for error in one.outputs.values())
        del replayed  # as large as the model
        if step.skipped:
            continue
        found.exact = found.exact and exact
        strategy = strategies().get(replay.ranks[0].facts.strategy)
        if strategy is not None and strategy.traits.sums_input_gradients_by_module:
            with summed_by_module(replay.model, Order(by_module=True)):
                _reorder(found, right, _sketched(replay, step.step))
        if replay.device.type != "cpu":  # its kernels may add in another order every time
            _reorder(found, right, _sketched(replay, step.step))
        if found.by_labels:
            with replay.loss_by_sum():
                _reorder(found, right, _sketched(replay, step.step))
        if not exact or found.by_labels:
            _perturb(found, replay, right, step.step, exact)
    compared = sum(len(g) + sum(len(one.outputs) for one in all_of)
                   for g, all_of in zip(found.gradients, found.contributions, strict=True))  # fmt: skip
    found.noise.comparisons = max(1, models * compared)
    return found


def _sketched(replay: Replay, step: int) -> Tensors:
    return {name: sketch(gradient) for name, gradient in replay.gradient(step, losses=False).total.items()}


def _perturb(found: Replayed, replay: Replay, right: Tensors, step: int, exact: bool) -> None:
    # Roundings of a loss have as many components as a gradient has elements: see ``SHAKEN_COMPONENTS``.
    draws = found.noise.shaken if exact else found.noise.arranged
    for seed in range(PERTURBED):
        number = PERTURBED * step + seed
        # Where outputs are equal, the loss alone may round otherwise.
        with replay.perturbed_losses(number) if exact else replay.perturbed(number):
            shaken = replay.gradient(step, Summing("rank" if seed % 2 else "", shuffled=number), losses=False)
        off = (e for one in shaken.calls for e in one.outputs.values() if e != math.inf)
        # Its own distance from the replayed outputs, and that of the recorded ones.
        found.noise.arranged[_OUTPUT].add(max(off, default=0.0), 0.0)
        for name, gradient in right.items():
            other = sketch(shaken.total[name])
            error = distance(other, gradient)
            if error != math.inf:
                draws[name].add(error, norm(other - gradient))


def _reorder(found: Replayed, right: Tensors, other: Tensors) -> None:
    for name, gradient in right.items():
        error = distance(other[name], gradient)
        if error != math.inf:
            found.reordered[name] = max(found.reordered.get(name, 0.0), error)


def _bounds(replay: Replay, replayed: StepGradient, step: int) -> dict[str, float]:
    """The sum of the calls' norms is at least the norm of the sum of their sizes, and needs no copy of them."""
    bounds = {}
    for name, gradient in replayed.total.items():
        sizes = [one.norms[name] for one in replayed.calls if name in one.norms]
        bounds[name] = sum_bound(len(sizes), sum(sizes) / replay.scale(step), gradient)
    return bounds


def forward(ranks: Sequence[UnitTrace], first: Mapping[str, float], replayed: Replayed) -> Stage:
    """The first weights, and the outputs that a gradient reached. ``first``: by trained tensor, how far the recorded
    one is from the rebuilt model's, relative."""
    stage = Stage("forward")
    if not ranks[0].facts.loaded and not ranks[0].facts.after:
        stage.measures += [Measure("initial-weight", 0, error, 0.0, name) for name, error in first.items()]
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
    recorded = (one.gradient for one in ranks[0].sketches)
    for taken, kept, right, bounds in zip(run.steps, recorded, replayed.gradients, replayed.bounds, strict=True):
        if taken.skipped:
            continue
        for name in run.weights:
            if name in outside:
                continue
            seen, expected = kept.get(name), right.get(name)
            size = norm(expected) if expected is not None else 0.0
            bound = bounds.get(name, 0.0)
            reordered = replayed.reordered.get(name, 0.0)
            noise, tolerance, chance = max(bound, reordered), bound + SAFETY * reordered, 0.0
            if replayed.measured_because is not None:
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
                error = distance(seen, expected)
                tolerance *= NORM_SLACK if len(expected) == BUCKETS else 1.0
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
