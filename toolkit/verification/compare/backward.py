"""Forward and gradient, each step from the candidate's own weights at that step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.reference.context import by_row
from toolkit.verification.cases.case import counted_step
from toolkit.verification.compare.arithmetic import loss_bound, sum_bounds
from toolkit.verification.compare.measure import Measure, Stage, finite
from toolkit.verification.compare.noise import NO_SIGNAL, Noise, relative_error
from toolkit.verification.compare.rearrange import is_packed
from toolkit.verification.compare.replay import Reference
from toolkit.verification.record.trace import RankTrace

WITHIN_FLOAT32 = 1e-4
"""Between what float32 rounds to and what another computation gives: an order of sums moves a gradient by 1e-6, in a
scalar that nearly cancels by 1e-5; a sample that sees another one, or a loss of another formula, by percents."""


@dataclass
class Replayed:
    """What the plain loop gives for every step, at the candidate's weights."""

    losses: list[list[float]]
    gradients: list[dict[str, torch.Tensor]]
    bounds: list[dict[str, float]] = field(default_factory=list)
    """By step and tensor, how far sums of the same terms can be apart; none where more than sums may differ."""
    from_unrounded: list[Deviation] = field(default_factory=list)
    """With options that round: how far loss and gradient are from those without them, by step."""
    from_natural: list[Deviation] = field(default_factory=list)
    """How far loss and gradient in the candidate's order of operations are from those in the plain loop's own, by
    step; none where the orders are the same."""
    statistics: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Running statistics after each step."""
    reordered: list[Measure] = field(default_factory=list)
    """In float32, where orders differ: that the candidate's order computes the same."""


@dataclass(frozen=True)
class Deviation:
    """Of the plain loop from the same without options that round, or in another order, relative, in the 2-norm: of the
    losses of a step's micro-batches, and of its whole gradient."""

    step: int
    loss: float
    gradient: float

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "loss": finite(self.loss), "gradient": finite(self.gradient)}


def replay(ranks: Sequence[RankTrace], reference: Reference, overflow_step: int | None) -> Replayed:
    """Run the reference over every step that the candidate took; measures the noise on the way, where it is needed."""
    run = ranks[0].run
    replayed = Replayed([], [])
    weights, statistics = run.weights, run.statistics
    compared: list[tuple[int, dict[str, tuple[float, float]]]] = []
    exact, reorders = reference.measured_because is None, reference.loop.reorders
    float32 = reference.loop.compute_dtype == torch.float32
    noisy = _noisy_steps(ranks, reference, overflow_step) if not exact or float32 else set()
    for step in run.steps:
        for plain in reference.options.values():
            plain.reset(reference.loop.model)
        scale = _scale(step.step, overflow_step, step.loss_scale)
        reference.set_statistics(statistics)
        losses, gradients = reference.gradient(step.step, weights, scale)
        replayed.statistics.append(reference.statistics())
        replayed.losses.append(losses)
        replayed.gradients.append(gradients)
        if exact:
            replayed.bounds.append(sum_bounds(reference.loop, reference.windows[step.step]))
        if step.step == counted_step(reference.resolved):
            reference.count_operators()
        if reference.rounding:
            unrounded = reference.without_rounding(step.step, weights, scale)
            replayed.from_unrounded.append(_deviation(step.step, (losses, gradients), unrounded))
        if step.step in noisy or (len(run.steps) == 1 and not exact):
            reference.measure_noise(step.step, weights, scale)
        if exact and reorders and step.step != overflow_step:
            # Parts of a row draw masks of other shapes than the row, so they are compared without.
            with reference.without_dropout() if reference.loop.order.in_parts else contextlib.nullcontext():
                if reference.loop.order.in_parts:
                    losses, gradients = reference.gradient(step.step, weights, scale)
                ordered = by_row(reference.windows[step.step], losses), gradients
                natural = reference.in_natural_order(step.step, weights, scale)
            replayed.from_natural.append(_deviation(step.step, ordered, natural))
            if float32 and (step.step in noisy or reference.loop.order.in_parts):
                compared.append((step.step, _errors(ordered, natural)))
        weights, statistics = step.weights, step.statistics
    for number, errors in compared:  # with the noise of all steps
        replayed.reordered += _reordered(number, errors, reference.noise, reference.loop.order.in_parts)
    return replayed


def _noisy_steps(ranks: Sequence[RankTrace], reference: Reference, overflow_step: int | None) -> set[int]:
    """Those whose noise is measured."""
    steps = ranks[0].run.steps
    if reference.resolved.precision.loss_scaling:  # what fp16 loses depends on how small a step's gradients are
        return {step.step for step in steps if step.step != overflow_step}
    reorders = reference.loop.reorders
    if reference.measured_because is None and not reorders and not is_packed(reference.windows[0][0][1]):
        return set()  # nothing is held against it
    # The first steps' gradients may be zero (adapters, warm-up); the short window has other shapes.
    return {step for step in (1, len(steps) - 2) if 0 <= step < len(steps) and step != overflow_step}


def _errors(ordered: tuple, natural: tuple) -> dict[str, tuple[float, float]]:
    """By tensor: the relative error of a gradient in another order, and the 2-norm of the natural one."""
    return {name: (relative_error(ordered[1][name], right), right.double().norm().item())
            for name, right in natural[1].items()}  # fmt: skip


def _reordered(step: int, errors: dict[str, tuple[float, float]], noise: Noise, in_parts: bool) -> list[Measure]:
    """``in_parts``: rows in parts have to give what whole rows do, however much it matters to the model which rows
    come together: there the noise is that of other rows (a rotary embedding that depends on the longest of them)."""
    found = []
    for name, (error, size) in errors.items():
        floor = noise.of(name, size)
        if floor < NO_SIGNAL:
            limit = WITHIN_FLOAT32 if in_parts else max(noise.tolerance(name, size), WITHIN_FLOAT32)
            found.append(Measure("gradient-reordered", step, error, limit, name, floor))
    return found


def _deviation(step: int, seen: tuple, without: tuple) -> Deviation:
    def whole(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([gradients[name].double().flatten() for name in without[1]])

    losses = relative_error(torch.tensor(seen[0]), torch.tensor(without[0]))
    return Deviation(step, losses, relative_error(whole(seen[1]), whole(without[1])))


def _scale(step: int, overflow_step: int | None, scale: float) -> float:
    return 1.0 if step == overflow_step else scale


def forward(ranks: Sequence[RankTrace], reference: Reference, replayed: Replayed) -> Stage:
    """The first weights, and every micro-batch's loss."""
    stage = Stage("forward")
    noise = reference.noise
    for name, first in reference.first.items():
        seen = ranks[0].run.weights.get(name)
        if seen is None:
            continue  # does not train: the gradient stage reports it
        error = relative_error(seen, first)
        stage.measures.append(Measure("initial-weight", 0, error, 0.0, name))
    tolerance, floor = noise.tolerance("loss"), noise.of("loss")
    widest = 0.0
    for step, losses in enumerate(replayed.losses):
        for (rank, micro), right in zip(reference.windows[step], losses, strict=True):
            taken = ranks[rank].run.steps[step].micros if step < len(ranks[rank].run.steps) else []
            loss = taken[micro.micro].loss if micro.micro < len(taken) else float("nan")
            error = 0.0 if loss == right else abs(loss - right) / abs(right) if right else float("inf")
            facts = {"seen": loss, "expected": right}
            allowed = loss_bound(right, micro.supervised) if replayed.bounds else tolerance
            widest, least = max(widest, allowed), allowed if replayed.bounds else floor
            chance = 0.0 if replayed.bounds else noise.chance
            stage.measures.append(
                Measure("loss", step, error, allowed, "", least, micro.micro, rank, facts, chance=chance)
            )
    # Means of activations, as the loss is one of what follows from them. Where all sums have one order they are equal
    # but for the factors of the mean.
    allowed = 4 * torch.finfo(torch.float32).eps if replayed.bounds else max(tolerance, WITHIN_FLOAT32)
    for step, expected in enumerate(replayed.statistics):
        seen_now = ranks[0].run.steps[step].statistics
        for name, right_value in expected.items():
            error = relative_error(seen_now[name], right_value) if name in seen_now else float("inf")
            stage.measures.append(Measure("running-statistic", step, error, allowed, name))
    for step, apart in noise.apart.items():
        stage.measures.append(Measure("loss-samples-apart", step, apart["loss"], tolerance, noise=floor))
    stage.detection_limit = widest
    return stage


def gradient(ranks: Sequence[RankTrace], noise: Noise, replayed: Replayed, overflow_step: int | None) -> Stage:
    """Every parameter's whole gradient, unscaled, before clipping."""
    stage = Stage("gradient")
    signal: set[str] = set()
    for step, (taken, right) in enumerate(zip(ranks[0].run.steps, replayed.gradients, strict=True)):
        if step == overflow_step:
            continue  # not finite, on purpose
        for name in dict.fromkeys([*taken.gradient, *right]):
            seen, expected = taken.gradient.get(name), right.get(name)
            size = expected.double().norm().item() if expected is not None else 0.0
            measured, floor = noise.tolerance(name, size), noise.of(name, size)
            tolerance, least, chance = measured, floor, noise.chance
            if replayed.bounds:
                tolerance = least = replayed.bounds[step].get(name, 0.0)
                chance = 0.0
            kind = "gradient"
            if seen is None or expected is None:
                missing = (seen is None) != (expected is None)
                other = seen if seen is not None else expected
                # No gradient and a gradient of zeros mean the same step.
                error = 1.0 if missing and other is not None and other.abs().max().item() > 0 else 0.0
                kind = "gradient-missing" if seen is None else "gradient-unexpected"
            else:
                error = relative_error(seen, expected)
            if expected is not None and least < NO_SIGNAL and size > 0:
                signal.add(name)
            stage.measures.append(Measure(kind, step, error, tolerance, name, least, chance=chance))
            if (apart := noise.apart.get(step, {}).get(name)) is not None and floor < NO_SIGNAL:
                limit = max(measured, WITHIN_FLOAT32)
                stage.measures.append(Measure("gradient-samples-apart", step, apart, limit, name, floor))
    stage.measures += replayed.reordered
    stage.detection_limit = max(
        (m.tolerance for m in stage.measures if m.kind == "gradient" and m.name in signal and m.noise < NO_SIGNAL),
        default=None,
    )
    silent = len(ranks[0].run.weights) - len(signal)
    stage.summary = f"{silent} tensors without signal" if silent else ""
    return stage
