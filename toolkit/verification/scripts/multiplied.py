"""Scripts that divide their gradients instead of their loss: by the supervised tokens of a step, once all are known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from toolkit.verification.scripts.losses import normalisation
from toolkit.verification.scripts.replay import Replay, Tensors
from toolkit.verification.scripts.stages import Replayed

_SAME = 1e-5
"""By how much gradients may differ from a multiple of the plain side's to be taken for one."""


def infer_multiplied(replay: Replay, replayed: Replayed) -> str | None:
    """Whether every recorded gradient is one number times the plain side's, and with that number the loss is the mean
    over the supervised tokens of its step. Then ``replay`` multiplies as the script does. Returns that, in words.

    Any other number, and any other loss, is left to the comparison: it may be a division that is missing.
    """
    if replayed.by_labels:
        return None
    factors = {}
    for step, kept in zip(replay.ranks[0].trace.run.steps, replay.ranks[0].sketches, strict=True):
        if step.skipped:
            continue
        factor = _factor(kept.gradient, replayed.gradients[step.step])
        if factor is None:
            return None
        factors[step.step] = factor
    if all(abs(factor - 1) < _SAME for factor in factors.values()):
        return None
    replay.multiplied = factors
    loss = normalisation(replay, replayed.contributions)
    wrong = any(not measure.ok for measure in loss.measures) or abs(loss.factor - 1) > 4 * _SAME
    if loss.kind != "cross-entropy" or wrong:
        replay.multiplied = {}
        return None
    return "the script multiplies its gradients after the backward passes, and so makes the mean over supervised tokens"


def _factor(seen: Mapping[str, torch.Tensor | None], right: Tensors) -> float | None:
    """Of sketches."""
    pairs = [(g, right[name]) for name, g in seen.items() if g is not None and name in right]
    along = sum((one * one).sum().item() for _, one in pairs)
    if not pairs or not along:
        return None
    factor = sum((g * one).sum().item() for g, one in pairs) / along
    size = sum((g * g).sum().item() for g, _ in pairs)
    off = sum((g - factor * one).pow(2).sum().item() for g, one in pairs)
    return factor if factor > 0 and math.sqrt(off) <= _SAME * math.sqrt(size) else None
