"""Of an optimizer that averages the weights: what evaluations and exports are at, and an evaluation's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from toolkit.optimizers import optimizer_kind
from toolkit.reference.optimizers import formula_for
from toolkit.verification.compare.arithmetic import loss_bound
from toolkit.verification.compare.measure import Measure
from toolkit.verification.compare.replay import Reference
from toolkit.verification.record.exported import AVERAGED
from toolkit.verification.record.trace import RankTrace, StepTrace, Tensors

_ROUNDINGS = 4
"""Of x = y + w (z - y), half an eps each: the difference, the number w and the product, of the size of x - y, and the
sum, of the size of x."""


def evaluation(ranks: Sequence[RankTrace], reference: Reference, exact: bool) -> list[Measure]:
    """The weights and the loss of the evaluation that was run between two steps; nothing for other optimizers.

    The weights are compared with the formula's average, and the loss with the plain loop's at the weights that were
    recorded. ``exact``: the candidate's operations have the plain loop's order.
    """
    settings = reference.resolved.recipe.optimizer
    if not optimizer_kind(settings.name).averages:
        return []
    run = ranks[0].run
    found = run.evaluated
    if found is None:
        missing = {"seen": float("nan"), "expected": float("nan")}
        return [Measure("evaluation-loss", len(run.steps), float("inf"), 0.0, facts=missing)]
    step = found.after - 1
    measures = _averages("evaluation-weight", run.steps[step], found.weights, settings)
    right, bound = _plain_loss(reference, found.weights)
    error = abs(found.loss - right) / abs(right) if right else float("inf")
    noise = reference.noise
    allowed, floor = (bound, bound) if exact else (noise.tolerance("loss"), noise.of("loss"))
    facts = {"seen": found.loss, "expected": right}
    chance = 0.0 if exact else noise.chance
    return [*measures, Measure("evaluation-loss", step, error, allowed, "", floor, facts=facts, chance=chance)]


def exported_averages(rank: RankTrace, settings: Any) -> list[Measure]:
    """The exported weights of a checkpoint after ``SAVE_AFTER`` steps; nothing for other optimizers."""
    weights = {name.removeprefix(AVERAGED): one for name, one in (rank.exported or {}).items() if AVERAGED in name}
    found = rank.run.evaluated
    if not weights or found is None:
        return []
    return _averages("exported-average", rank.run.steps[found.after - 1], weights, settings)


def _averages(kind: str, taken: StepTrace, seen: Tensors, settings: Any) -> list[Measure]:
    """``seen`` against the average after a step. Errors are relative to how far the average is from the weights of
    training, so that those instead of it are an error of 1."""
    found, eps = [], torch.finfo(torch.float32).eps
    for name, weight in taken.weights.items():
        state = taken.states[name]
        y = weight.double()
        formula: Any = formula_for(settings, tuple(weight.shape), False)
        right = y if state is None else formula.average(y, state.moments["z"].double())
        if name not in seen:
            found.append(Measure(kind, taken.step, float("inf"), 0.0, name))
            continue
        apart = (right - y).norm().item()
        error = (seen[name].double() - right).norm().item()
        scale = apart or 1.0
        noise = eps * (right.norm().item() + apart) / scale
        found.append(Measure(kind, taken.step, error / scale, _ROUNDINGS / 2 * noise, name, noise))
    return found


def _plain_loss(reference: Reference, weights: Tensors) -> tuple[float, float]:
    """Mean loss of the first window in evaluation mode, and the bound of its error, relative."""
    loop = reference.loop
    reference.set_weights(weights)
    extras, loop.extras = loop.extras, type(loop.extras)()
    loop.model.eval()
    try:
        with torch.no_grad(), loop.autocast():
            losses = [(loop.loss_sum(micro).item(), micro.supervised) for _, micro in reference.whole_rows(0)]
    finally:
        loop.model.train()
        loop.extras = extras
    total, count = sum(loss for loss, _ in losses), sum(tokens for _, tokens in losses)
    return total / max(1, count), max(loss_bound(loss, tokens) for loss, tokens in losses if tokens)
