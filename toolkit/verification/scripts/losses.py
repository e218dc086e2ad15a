"""How the loss of a step is normalised, where it is a cross-entropy: with what weight every micro-batch is in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.verification.compare.measure import Measure
from toolkit.verification.diagnose.attribution import Attribution
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.gradient import by_weights
from toolkit.verification.scripts.replay import Contribution, Replay

DEFECTS = (
    "accumulation-summed",
    "accumulation-divided-twice",
    "ranks-summed",
    "ranks-divided-twice",
    "short-window-divided-by-full",
    "loss-scale-left",
)
"""Factors of a whole gradient that nobody means."""

_FROM = "the run is compared from the gradient at the model's outputs on"


@dataclass
class LossFound:
    """``kind``: ``cross-entropy`` or ``other``. ``measures``: one for each micro-batch, of its weight. ``note``: what a
    user should know besides."""

    kind: str
    measures: list[Measure] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    notes: list[str] = field(default_factory=list)
    factor: float = 1.0
    """What the loss is of the mean over supervised tokens, in the step where it is farthest from 1."""


def normalisation(replay: Replay, steps: Sequence[Sequence[Contribution]]) -> LossFound:
    """Compare every step's loss with the mean over all supervised tokens of its micro-batches and ranks."""
    if replay.tokens is not None:
        return LossFound("cross-entropy")
    skipped = {step.step for step in replay.ranks[0].trace.run.steps if step.skipped}
    losses = [[one.loss for one in step] for at, step in enumerate(steps) if at not in skipped]
    if not any(losses) or any(loss is None for step in losses for loss in step):
        return LossFound("other", notes=[f"the loss is not a cross-entropy of the logits: {_FROM}"])
    if any(loss.spread > loss.resolution for step in losses for loss in step if loss is not None):
        return LossFound(
            "other",
            notes=[f"tokens of one micro-batch weigh differently in the loss: {_FROM}"],
        )
    found = LossFound("cross-entropy")
    factors = []
    count = max(one.micro for step in steps for one in step) + 1
    for at, step in enumerate(steps):
        if at in skipped:
            continue
        total = sum(one.loss.tokens for one in step if one.loss)
        weights = [one.loss.weight * total / replay.scale(at) for one in step if one.loss]
        tokens = [one.loss.tokens for one in step if one.loss]
        mean = sum(w * t for w, t in zip(weights, tokens, strict=True)) / total
        factors.append(mean)
        for one, weight in zip(step, weights, strict=True):
            assert one.loss is not None
            facts = {"seen": weight / mean, "expected": 1.0, "tokens": one.loss.tokens, "all": total}
            error = abs(weight / mean - 1.0)
            found.measures.append(
                Measure("micro-batch-weight", at, error, one.loss.resolution, "", one.loss.resolution / 4, one.micro,
                        one.rank, facts)
            )  # fmt: skip
        uneven = any(not m.ok for m in found.measures if m.step == at)
        if found.diagnosis is None and (uneven or abs(mean - 1) > 1e-3):
            found.diagnosis = _cause(replay, step, weights, tokens, count)
    _whole(found, factors, replay)
    padding = sum(loss.padding for step in losses for loss in step if loss)
    if padding:
        total = sum(loss.tokens for step in losses for loss in step if loss)
        found.notes.append(f"{padding} of {total} supervised tokens are padding: their attention mask is 0")
    return found


def _cause(
    replay: Replay, step: Sequence[Contribution], weights: list[float], tokens: list[int], count: int
) -> Diagnosis | None:
    places = [(one.rank, one.micro) for one in step]
    cause = by_weights(Attribution(weights, places, tokens, 0.0), count, replay.averaged)
    if cause is not None and cause.id == "micro-batch-weights":  # another pattern, times a factor
        mean = sum(w * t for w, t in zip(weights, tokens, strict=True)) / sum(tokens)
        known = by_weights(Attribution([w / mean for w in weights], places, tokens, 0.0), count, replay.averaged)
        cause = known or cause
    return cause


def _whole(found: LossFound, factors: list[float], replay: Replay) -> None:
    """The factor that all micro-batches of a step have in common: a defect where it is the accumulation or the number
    of ranks, a choice of the script otherwise (Adam's steps do not depend on it)."""
    if any(not measure.ok for measure in found.measures):
        count = max((m.micro or 0 for m in found.measures), default=0) + 1
        if _forgotten(factors[0], count, replay.averaged, 0.02):
            found.notes.append(f"besides, the loss is about {factors[0]:.3g} times the mean over supervised tokens")
        return
    worst = found.factor = max(factors, key=lambda one: abs(math.log(max(one, 1e-30))))
    if abs(worst - 1) <= max(m.tolerance for m in found.measures):
        found.diagnosis = None
        return
    count = max((m.micro or 0 for m in found.measures), default=0) + 1
    if (found.diagnosis is not None and found.diagnosis.id in DEFECTS) or _forgotten(worst, count, replay.averaged):
        facts = {"seen": worst, "expected": 1.0, "tokens": 0, "all": 0}
        found.measures.append(Measure("loss-weight", factors.index(worst), abs(worst - 1), 1e-3, facts=facts))
        return
    cause = f": {found.diagnosis.cause}" if found.diagnosis and found.diagnosis.id != "uniform-scale" else ""
    found.notes.append(f"the loss is {worst:.5g} times the mean over supervised tokens{cause}")
    found.diagnosis = None


def _forgotten(factor: float, accumulation: int, ranks: int, off: float = 2e-3) -> bool:
    """Whether a factor is that of a division by the micro-batches and by the ranks that is missing, or made twice."""
    both = [accumulation**a * ranks**b for a in (-1, 0, 1) for b in (-1, 0, 1)]
    return any(value != 1 and abs(factor / value - 1) < off for value in both)
