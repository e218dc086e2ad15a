"""Recognises a cross-entropy from its gradient at the logits, and with what weight it is in the loss.

The gradient of a weighted cross-entropy at one row of logits is ``weight * (softmax - onehot(label))``: its only
negative element is the label's. So labels, weights and the number of supervised tokens are read from the gradient,
whoever computed the loss, and from whichever labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROUNDINGS = 4.0
"""A row's gradient is rounded to the dtype of the logits where it is passed on, some of them twice."""


@dataclass(frozen=True)
class CallLoss:
    """``weight``: of each supervised token; ``spread``: by how much rows differ in it, relative. ``tokens``: rows with
    a gradient, of ``rows``. ``padding``: supervised tokens where the attention mask is 0. ``resolution``: by how much a
    weight may be off by rounding."""

    weight: float
    spread: float
    tokens: int
    rows: int
    padding: int
    resolution: float


_ROWS = 256
"""Rows of logits that are compared at a time, in float64: a model's vocabulary is large."""


def cross_entropy(logits: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor | None) -> CallLoss | None:
    """None where the gradient is not that of a cross-entropy. ``logits``: of shape (..., classes)."""
    g, z = gradient.reshape(-1, gradient.shape[-1]), logits.reshape(-1, logits.shape[-1])
    supervised = torch.cat([part.abs().amax(-1) > 0 for part in g.split(_ROWS)])
    tokens = int(supervised.sum())
    if not tokens or g.shape[-1] < 2:
        return None
    eps = max(torch.finfo(gradient.dtype).eps, torch.finfo(logits.dtype).eps)
    resolution = max(1e-5, ROUNDINGS * eps)
    rows = [_row_sums(g[at], z[at]) for at in supervised.nonzero().squeeze(-1).split(_ROWS)]
    along, across, size, own = (torch.cat(parts) for parts in zip(*rows, strict=True))
    weight = (across.sum() / along.sum()).item()
    # |g - w t|^2, of which the terms cancel to 1e-8 of |g|, far below the resolution.
    left = math.sqrt(max(0.0, (size.sum() - 2 * weight * across.sum() + weight**2 * along.sum()).item()))
    left /= max(math.sqrt(size.sum().item()), 1e-300)
    by_row = across / along.clamp(min=1e-300)
    if weight <= 0 or own.median().item() > 10 * resolution:
        return None
    loud = along > 0.05 * along.max()
    spread = ((by_row[loud] - weight).abs().max() / weight).item()
    if left > 10 * resolution and spread <= 10 * resolution:
        return None
    return CallLoss(weight, spread, tokens, int(supervised.numel()), _padding(supervised, gradient, mask), resolution)


def _row_sums(gradient: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By row, of the target t = softmax - onehot and the gradient g: |t|^2, g t, |g|^2, and what part of g is no
    multiple of t. float64."""
    g = gradient.double()
    target = torch.softmax(logits.double(), -1)
    labels = g.argmin(-1, keepdim=True)
    target.scatter_add_(-1, labels, torch.full_like(labels, -1, dtype=target.dtype))
    along, across, size = (target * target).sum(-1), (g * target).sum(-1), (g * g).sum(-1)
    factor = across / along.clamp(min=1e-300)
    own = (g - factor.unsqueeze(-1) * target).norm(dim=-1) / size.sqrt().clamp(min=1e-300)
    return along, across, size, own


def _padding(supervised: torch.Tensor, gradient: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Rows of a language model predict the next position."""
    if gradient.ndim != 3 or mask is None or tuple(mask.shape) != tuple(gradient.shape[:2]):
        return 0
    rows = supervised.view(gradient.shape[:2])
    return int((rows[:, :-1] & (mask[:, 1:] == 0)).sum())
