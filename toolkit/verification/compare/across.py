"""Cross-rank: every rank holds the same weights and took the same decisions. Round-trip: saved, loaded, resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from toolkit.reference.loop import Window
from toolkit.rooms import option_named
from toolkit.verification.cases.case import SAVE_AFTER
from toolkit.verification.compare.evaluation import exported_averages
from toolkit.verification.compare.ledger import resumed_ledger
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import SAFETY, relative_error
from toolkit.verification.record.trace import RankTrace, RunTrace, StepTrace

_AS_OPTIMIZER = " as the optimizer has it"


def cross_rank(ranks: Sequence[RankTrace]) -> Stage:
    """Gradients, live weights, learning rates, norms and skips of every rank against those of rank 0."""
    stage = Stage("cross-rank", detection_limit=0.0, summary="bit-equal" if len(ranks) > 1 else "one process")
    stage.measures += _copies(0, [rank.run.copies for rank in ranks])
    end = len(ranks[0].run.steps) - 1
    for name in ranks[0].run.frozen:
        changed = [rank.rank for rank in ranks if rank.run.frozen_after.get(name) != rank.run.frozen.get(name)]
        stage.measures.append(Measure("frozen-weight", end, len(changed), 0.0, name, facts={"ranks": changed}))
    for step, taken in enumerate(ranks[0].run.steps):
        here = [rank.run.steps[step] for rank in ranks if step < len(rank.run.steps)]
        stage.measures.append(Measure("steps-taken", step, len(ranks) - len(here), 0.0))
        for name in taken.gradient_digests:
            found = {other.gradient_digests.get(name) for other in here}
            stage.measures.append(Measure("rank-gradient", step, len(found) - 1, 0.0, name))
        stage.measures += _copies(step, [other.copies for other in here])
        for what in ("lr", "norm", "skipped", "loss_scale", "updates_before"):
            values = [getattr(other, what) for other in here]
            facts = {"values": ", ".join(map(str, values))}
            differing = len({str(value) for value in values}) - 1
            if what == "lr" and len({frozenset(other.rates) for other in here}) > 1:
                differing = _rates_apart(here)  # stages have other weights, which may all be in other groups
            stage.measures.append(Measure("rank-value", step, differing, 0.0, what, facts=facts))
    return stage


def _rates_apart(here: Sequence[StepTrace]) -> int:
    """How many weights have another learning rate on some rank than on others."""
    seen: dict[str, set[float]] = {}
    for taken in here:
        for name, rate in taken.rates.items():
            seen.setdefault(name, set()).add(rate)
    return sum(len(rates) > 1 for rates in seen.values())


def _copies(step: int, copies: Sequence[dict[str, str]]) -> list[Measure]:
    found = []
    for name in copies[0]:
        if name.endswith(_AS_OPTIMIZER):
            same = copies[0][name] == copies[0][name.removesuffix(_AS_OPTIMIZER)]
            found.append(Measure("optimizer-weight", step, float(not same), 0.0, name.removesuffix(_AS_OPTIMIZER)))
        else:
            # FSDP1 may put a small weight wholly on one rank: the others have no copy that could differ.
            others = {copy[name] for copy in copies if name in copy}
            found.append(Measure("rank-weight", step, len(others) - 1, 0.0, name))
    return found


def round_trip(
    ranks: Sequence[RankTrace], windows: Sequence[Window], task: str, tolerance: float, settings: Any = None
) -> Stage:
    """What came back from a checkpoint, and the steps taken from it, against the run that was never interrupted.

    ``tolerance``: 0 where arithmetic repeats bit by bit (a CPU), else the gradient's. ``settings``: the recipe's
    section ``optimizer``.
    """
    summary = "reload, resume bit-equal" if tolerance == 0 else "reload bit-equal, resume within rounding"
    stage = Stage("round-trip", detection_limit=tolerance, summary=summary)
    resumed = ranks[0].resumed
    whole = ranks[0].run.steps[SAVE_AFTER - 1 :]
    if resumed is None or not whole:
        stage.measures.append(Measure("resume", SAVE_AFTER, float("inf"), 0.0))
        return stage
    stage.measures += _tensors(SAVE_AFTER, "reloaded", whole[0], resumed.weights, resumed.states, 0.0)
    stage.measures += _shadows(SAVE_AFTER, "reloaded", whole[0], resumed.averages, 0.0)
    runs = [rank.resumed or RunTrace() for rank in ranks]
    stage.measures += [replace(m, phase="resumed") for m in resumed_ledger(runs, windows, task, SAVE_AFTER)]
    stage.measures += _statistics(SAVE_AFTER, "reloaded", whole[0].statistics, resumed.statistics, 0.0)
    for straight, again in zip(whole[1:], resumed.steps, strict=True):
        step = straight.step
        moved = float(straight.lr != again.lr or straight.updates_before != again.updates_before)
        rates = {"seen": again.lr, "expected": straight.lr}
        stage.measures.append(Measure("schedule", step, moved, 0.0, facts=rates, phase="resumed"))
        scales = {"seen": again.loss_scale, "expected": straight.loss_scale}
        off = float(straight.loss_scale != again.loss_scale)
        stage.measures.append(Measure("loss-scale", step, off, 0.0, facts=scales, phase="resumed"))
        for name, gradient in straight.gradient.items():
            other = again.gradient.get(name)
            error = 0.0
            if gradient is not None:
                error = float("inf") if other is None else _error(other, gradient)
            stage.measures.append(Measure("gradient-after-resume", step, error, tolerance, name, phase="resumed"))
        stage.measures += _tensors(step, "resumed", straight, again.weights, again.states, tolerance)
        stage.measures += _shadows(step, "resumed", straight, again.averages, tolerance)
        stage.measures += _statistics(step, "resumed", straight.statistics, again.statistics, tolerance)
    stage.measures += _exported(ranks[0].exported)
    stage.measures += exported_averages(ranks[0], settings)
    if ranks[0].run.frozen != resumed.frozen:
        stage.measures.append(Measure("frozen-weights", SAVE_AFTER, 1.0, 0.0))
    return stage


def _exported(answers: dict[str, torch.Tensor] | None) -> list[Measure]:
    """An export answers as the trained model does; a merged one up to rounding."""
    if answers is None:
        return []
    trained = answers["trained"]
    noise = max(relative_error(trained, answers["perturbed"]), torch.finfo(torch.float32).eps)
    found = []
    for what in ("exported", "merged"):
        if what in answers:
            error = _error(answers[what], trained)
            found.append(Measure("logits", SAVE_AFTER, error, SAFETY * noise, what, noise))
    return found


def _tensors(
    step: int, phase: str, right: StepTrace, weights: dict[str, torch.Tensor], states: dict[str, Any], tolerance: float
) -> list[Measure]:
    found = []
    for name, weight in right.weights.items():
        other = weights.get(name)
        error = float("inf") if other is None else _error(other, weight)
        found.append(Measure("weight", step, error, tolerance, name, phase=phase))
        mine, theirs = right.states[name], states.get(name)
        if mine is None:
            continue
        if theirs is None:
            found.append(Measure("state-not-restored", step, float("inf"), 0.0, name, phase=phase))
            continue
        off = abs(mine.step - theirs.step)
        counts = {"seen": theirs.step, "expected": mine.step}
        found.append(Measure("step-count", step, off, 0.0, name, facts=counts, phase=phase))
        for key, moment in mine.moments.items():
            off = _error(theirs.moments[key], moment)
            found.append(Measure("moment", step, off, tolerance, name, facts={"moment": key}, phase=phase))
    return found


def _shadows(
    step: int, phase: str, right: StepTrace, seen: Mapping[str, torch.Tensor], tolerance: float
) -> list[Measure]:
    """What options keep of the weights."""
    measures = []
    for tensor, value in right.averages.items():
        name, _, keeper = tensor.rpartition(".")
        option = option_named(keeper)
        assert option is not None
        assert option.shadow is not None
        error = _error(seen[tensor], value) if tensor in seen else float("inf")
        measures.append(Measure(option.shadow.noun, step, error, tolerance, name, phase=phase))
    return measures


def _statistics(
    step: int, phase: str, right: dict[str, torch.Tensor], seen: dict[str, torch.Tensor], tolerance: float
) -> list[Measure]:
    """Running statistics, of rank 0."""
    return [
        Measure("running-statistic", step, _error(seen[name], value) if name in seen else float("inf"), tolerance, name,
                phase=phase)
        for name, value in right.items()
    ]  # fmt: skip


def _error(seen: torch.Tensor, right: torch.Tensor) -> float:
    if seen.shape != right.shape:
        return float("inf")
    return 0.0 if torch.equal(seen, right) else max(relative_error(seen, right), 1e-300)
