"""The likely cause of a wrong gradient: from the weights that recorded calls have in it, and from where it is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.verification.compare.measure import Stage
from toolkit.verification.diagnose.attribution import Attribution
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.diagnose.gradient import by_weights
from toolkit.verification.scripts.replay import Replay, Summing, Tensors
from toolkit.verification.scripts.sketch import norm, sketch
from toolkit.verification.scripts.stages import Replayed

_EXPLAINED = 1e-3
"""Residual below which weights of calls explain a gradient."""
_NEARER = 4.0
"""A sum in 16 bits explains a gradient that it is this much nearer to than the sum in 32."""


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
    tokens = [one.loss.tokens if one.loss else 1 for one in contributions]
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
