"""The likely cause of a difference. Of a wrong gradient: from the weights of the calls in it, and from where it is
wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from toolkit.verification.compare.ledger import Row, rows_of
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.diagnose.attribution import Attribution
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.gradient import by_weights
from toolkit.verification.diagnose.step import clip_cause_of, is_bf16, rank_cause
from toolkit.verification.scripts.labels import tensors_of
from toolkit.verification.scripts.replay import Replay, Summing, Tensors
from toolkit.verification.scripts.sketch import EXACT, norm, sketch
from toolkit.verification.scripts.stages import Replayed

_EXPLAINED = 1e-3
"""Residual below which weights of calls explain a gradient."""
_NEARER = 4.0
"""A sum in 16 bits explains a gradient that it is this much nearer to than the sum in 32."""


def cause_of(replay: Replay, replayed: Replayed, stage: Stage, measure: Measure) -> Diagnosis | None:
    """Of the first difference, in ``stage``. None where nothing known fits."""
    match stage.name:
        case "ledger":
            each = samples_of(replay, measure.step)
            if len(each) > 1 and all(rank == each[0] for rank in each):
                return Diagnosis("same-samples-on-every-rank", {"measure": measure.sentence})
        case "forward":
            starts = [m.name for m in stage.wrong if m.kind == "initial-weight"]
            return Diagnosis("initial-weights-differ", {"count": len(starts), "first": starts[0]}) if starts else None
        case "gradient":
            return gradient_cause(replay, replayed, stage)
        case "clip":
            norms = [math.hypot(*(exact for exact, _ in one.norms.values())) for one in replay.ranks[0].sketches]
            return clip_cause_of(stage, replay.ranks[0].facts.limit, norms)
        case "update":
            return _update_cause(replay, [m.name for m in stage.wrong if m.step == measure.step], measure.step)
        case "optimizer-state":
            if all(dtype == torch.float32 for dtype in replay.dtypes.values()):
                weights, moments = replay.weights_before(0), replay.ranks[0].sketches[measure.step].moments
                whole = [m for name, of in moments.items() if weights[name].numel() <= EXACT for m in of.values()]
                if whole and all(is_bf16(one) for one in whole):
                    return Diagnosis("moments-in-bf16", {"count": len(whole)})
        case "cross-rank":
            return rank_cause(stage, measure)
    return None


def samples_of(replay: Replay, step: int) -> list[list[Row]]:
    """The samples of a step, by rank; once where all ranks divide the layers of the same ones."""
    ranks = replay.ranks[:1] if replay.ranks[0].facts.strategy == "tensor" else replay.ranks
    return [
        [row for call in rank.facts.steps[step] for row in rows_of(tensors_of(replay.arguments(call)[1]))]
        for rank in ranks
    ]


def _update_cause(replay: Replay, wrong: list[str], step: int) -> Diagnosis | None:
    unit = replay.ranks[0]
    before, after = (unit.begun if step == 0 else unit.sketches[step - 1]).weights, unit.sketches[step].weights
    facts = {"count": len(wrong), "first": wrong[0]}
    if all(torch.equal(before[name], after[name]) for name in wrong):
        return Diagnosis("other-parameters-updated", facts | {"what": "unchanged by the step"})
    kept = unit.trace.run.steps[step].weights
    values = [kept[name] if kept[name].numel() else after[name] for name in wrong]
    if all(replay.dtypes[name] == torch.float32 for name in wrong) and all(is_bf16(one) for one in values):
        return Diagnosis("masters-missing", {"count": len(wrong)})
    decayed = {name for group in unit.facts.groups for name in group.names if group.decay and group.lr[step]}
    spared = [name for name in wrong if name not in decayed]
    if decayed and len(spared) in (0, len(wrong)):
        return Diagnosis("decays-spared-weights" if spared else "weight-decay-missing", facts)
    return None


def gradient_cause(replay: Replay, replayed: Replayed, stage: Stage) -> Diagnosis | None:
    """None where nothing known fits."""
    first = stage.first_wrong
    if first is None:
        return None
    step = first.step
    wrong = [m.name for m in stage.measures if not m.ok and m.step == step]
    sketches = replay.ranks[0].sketches
    seen = sketches[step].gradient
    right, contributions = replayed.gradients[step], replayed.contributions[step]
    missing = [name for name in wrong if (gradient := seen.get(name)) is None or not bool(gradient.any())]
    if missing and len(missing) == len(wrong):
        facts = {"count": len(missing), "all": len(right), "first": missing[0]}
        return Diagnosis("no-gradient", facts)
    taken = {name: gradient for name in wrong if (gradient := seen.get(name)) is not None and name in right}
    if strange := [name for name, gradient in taken.items() if not bool(torch.isfinite(gradient).all())]:
        return Diagnosis("gradient-not-finite", {"count": len(strange), "first": strange[0]})
    if not taken:
        return None
    if step and (before := sketches[step - 1].gradient) and _kept(taken, right, before):
        return Diagnosis("gradient-not-cleared", {"step": step + 1})
    if rounded := _rounded(replay, taken, right, step):
        return rounded
    columns = [{name: g / replay.scale(step) for name, g in one.gradients.items()} for one in contributions]
    fitted = _fit(columns, taken)
    if fitted is None:
        return None
    weights, residual = fitted
    places = [(one.rank, one.micro) for one in contributions]
    tokens = [one.tokens for one in contributions]
    if residual < _EXPLAINED:
        count = max(micro for _, micro in places) + 1
        return by_weights(Attribution(weights, places, tokens, residual), count, replay.averaged)
    return None


def _kept(taken: Tensors, right: Tensors, before: dict[str, torch.Tensor | None]) -> bool:
    """Whether the last step's gradient is still in this one."""
    extra = {name: gradient - right[name] for name, gradient in taken.items()}
    old = {name: gradient for name in taken if (gradient := before.get(name)) is not None}
    if old.keys() != extra.keys():
        return False
    fitted = _fit([old], extra)
    return fitted is not None and fitted[1] < _EXPLAINED and abs(fitted[0][0]) > 1e-3


def _rounded(replay: Replay, taken: Tensors, right: Tensors, step: int) -> Diagnosis | None:
    """Whether sums in 16 bits explain the difference: over micro-batches, ranks, or both."""
    exact = _distance(taken, right)
    kept = replay.ranks[0].sketches[step].rounded
    for dtype in (torch.bfloat16, torch.float16):
        short = str(dtype).removeprefix("torch.")
        representable = all(short in kept[name] for name in taken)
        declared = replay.ranks[0].facts.reduce == short and exact < 2e-2
        if declared or (representable and exact < 2e-2) or _nearest(replay, taken, step, dtype) * _NEARER < exact:
            return Diagnosis("sums-rounded-to-16-bits", {"residual": exact})
    return None


def _nearest(replay: Replay, taken: Tensors, step: int, dtype: torch.dtype) -> float:
    """How near sums that are rounded to 16 bits come: of a rank's micro-batches, of every micro-batch over the ranks,
    and of all."""

    def off(gradient: Tensors) -> float:
        return _distance(taken, {name: sketch(gradient[name]) for name in taken})

    whole = replay.gradient(step, losses=False).total
    sums = [off({name: whole[name].to(dtype) for name in taken})]
    del whole  # as large as the model
    return min([*sums, *(off(replay.gradient(step, Summing(groups, dtype), losses=False).total)
                         for groups in ("rank", "micro"))])  # fmt: skip


def _distance(taken: Tensors, other: Tensors) -> float:
    off = sum(norm(taken[name] - other[name]) ** 2 for name in taken)
    size = sum(norm(taken[name]) ** 2 for name in taken)
    return (off / max(size, 1e-300)) ** 0.5


def _fit(columns: Sequence[Tensors], target: Tensors) -> tuple[list[float], float] | None:
    """Weights of ``columns`` in ``target`` by least squares, and what part of it they leave; of sketches."""
    names = [name for name in target if all(name in column for column in columns)]
    if not names:
        return None
    wanted = torch.cat([target[name].double().reshape(-1) for name in names])
    matrix = torch.stack([torch.cat([c[name].double().reshape(-1) for name in names]) for c in columns], dim=1)
    found = torch.linalg.lstsq(matrix, wanted.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    residual = (matrix @ found - wanted).norm().item() / max(wanted.norm().item(), 1e-300)
    return found.tolist(), residual
