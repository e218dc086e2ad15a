"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.recipe.schema import Optimizer


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """torch's SGD over parameter groups, with dampening 0."""
    # torch 2.13.0 has no rule to shard its fused SGD, and on a CPU it computes wrong momenta from 16-bit gradients.
    able = all(p.dtype == torch.float32 and not isinstance(p, DTensor) for group in groups for p in group["params"])
    return torch.optim.SGD(
        groups,
        lr=optimizer.lr,
        momentum=optimizer.momentum or 0.0,
        nesterov=bool(optimizer.nesterov),
        fused=fused and optimizer.kernel == "fused" and able,
        foreach=True if optimizer.kernel == "foreach" else None,
    )
