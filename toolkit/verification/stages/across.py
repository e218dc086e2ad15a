"""Cross-rank: every rank holds the same weights and took the same decisions. Round-trip: saved, loaded, gone on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.reference.loop import Window
from toolkit.verification.case import SAVE_AFTER
from toolkit.verification.measure import Measure, Stage
from toolkit.verification.replay import SAFETY, relative_error
from toolkit.verification.stages.ledger import resumed_ledger
from toolkit.verification.trace import RankTrace, RunTrace, StepTrace

_AS_OPTIMIZER = " as the optimizer has it"


def cross_rank(ranks: Sequence[RankTrace]) -> Stage:
    """Gradients, live weights, learning rates, norms and skips of every rank against those of rank 0."""
    stage = Stage("cross-rank", detection_limit=0.0, summary="bit-equal" if len(ranks) > 1 else "one process")
    stage.measures += _copies(0, [rank.run.copies for rank in ranks])
    end = len(ranks[0].run.steps) - 1
    for name in ranks[0].run.frozen:
        changed = [rank.rank for rank in ranks if rank.run.frozen_after.get(name) != rank.run.frozen.get(name)]
        stage.measures.append(Measure(end, name, len(changed), 0.0, said=f"a frozen weight changed on ranks {changed}"))
    for step, taken in enumerate(ranks[0].run.steps):
        here = [rank.run.steps[step] for rank in ranks if step < len(rank.run.steps)]
        stage.measures.append(Measure(step, "steps taken", len(ranks) - len(here), 0.0, said="a rank stopped early"))
        for name in taken.gradient_digests:
            found = {other.gradient_digests.get(name) for other in here}
            stage.measures.append(Measure(step, f"{name} gradient", len(found) - 1, 0.0, said="differs between ranks"))
        stage.measures += _copies(step, [other.copies for other in here])
        for what in ("lr", "norm", "skipped", "loss_scale", "updates_before"):
            values = [getattr(other, what) for other in here]
            said = f"by rank: {', '.join(map(str, values))}"
            stage.measures.append(Measure(step, what, len({str(value) for value in values}) - 1, 0.0, said=said))
    return stage


def _copies(step: int, copies: Sequence[dict[str, str]]) -> list[Measure]:
    found = []
    for name in copies[0]:
        if name.endswith(_AS_OPTIMIZER):
            same = copies[0][name] == copies[0][name.removesuffix(_AS_OPTIMIZER)]
            said = "the weights that compute are not those that the optimizer updates"
            found.append(Measure(step, name.removesuffix(_AS_OPTIMIZER), float(not same), 0.0, said=said))
        else:
            # FSDP1 may put a small weight wholly on one rank: the others have no copy that could differ.
            others = {copy[name] for copy in copies if name in copy}
            found.append(Measure(step, name, len(others) - 1, 0.0, said="weights differ between ranks"))
    return found


def round_trip(ranks: Sequence[RankTrace], windows: Sequence[Window], task: str, tolerance: float) -> Stage:
    """What came back from a checkpoint, and the steps taken from it, against the run that was never interrupted.

    ``tolerance``: 0 where arithmetic repeats bit by bit (a CPU), else the gradient's.
    """
    stage = Stage("round-trip", detection_limit=tolerance, summary="reload, resume bit-equal")
    resumed = ranks[0].resumed
    whole = ranks[0].run.steps[SAVE_AFTER - 1 :]
    if resumed is None or not whole:
        stage.measures.append(Measure(SAVE_AFTER, "resume", float("inf"), 0.0, said="the run never came back"))
        return stage
    stage.measures += _tensors(SAVE_AFTER, "reloaded", whole[0], resumed.weights, resumed.states, 0.0)
    runs = [rank.resumed or RunTrace() for rank in ranks]
    stage.measures += [
        Measure(m.step, f"resumed {m.tensor}", m.error, m.tolerance, said=m.said)
        for m in resumed_ledger(runs, windows, task, SAVE_AFTER)
    ]
    for straight, again in zip(whole[1:], resumed.steps, strict=True):
        step = straight.step
        moved = float(straight.lr != again.lr or straight.updates_before != again.updates_before)
        said = f"learning rate {again.lr}, {straight.lr} uninterrupted"
        stage.measures.append(Measure(step, "resumed schedule", moved, 0.0, said=said))
        scale = float(straight.loss_scale != again.loss_scale)
        stage.measures.append(Measure(step, "resumed loss scale", scale, 0.0))
        for name, gradient in straight.gradient.items():
            other = again.gradient.get(name)
            error = 0.0
            if gradient is not None:
                error = float("inf") if other is None else _error(other, gradient)
            stage.measures.append(Measure(step, f"resumed {name} gradient", error, tolerance))
        stage.measures += _tensors(step, "resumed", straight, again.weights, again.states, tolerance)
    stage.measures += _exported(ranks[0].exported)
    if ranks[0].run.frozen != resumed.frozen:
        stage.measures.append(Measure(SAVE_AFTER, "frozen weights", 1.0, 0.0, said="differ after the resume"))
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
            said = f"the {what} model answers differently"
            found.append(Measure(SAVE_AFTER, f"{what} logits", error, SAFETY * noise, noise, said=said))
    return found


def _tensors(
    step: int, what: str, right: StepTrace, weights: dict[str, torch.Tensor], states: dict[str, Any], tolerance: float
) -> list[Measure]:
    found = []
    for name, weight in right.weights.items():
        other = weights.get(name)
        error = float("inf") if other is None else _error(other, weight)
        found.append(Measure(step, f"{what} {name}", error, tolerance))
        mine, theirs = right.states[name], states.get(name)
        if mine is None:
            continue
        if theirs is None:
            found.append(Measure(step, f"{what} {name} state", float("inf"), 0.0, said="no optimizer state came back"))
            continue
        off = abs(mine.step - theirs.step)
        said = f"{theirs.step}, {mine.step} expected"
        found.append(Measure(step, f"{what} {name} step count", off, 0.0, said=said))
        for key, moment in mine.moments.items():
            found.append(Measure(step, f"{what} {name} {key}", _error(theirs.moments[key], moment), tolerance))
    return found


def _error(seen: torch.Tensor, right: torch.Tensor) -> float:
    if seen.shape != right.shape:
        return float("inf")
    return 0.0 if torch.equal(seen, right) else max(relative_error(seen, right), 1e-300)
