"""One AdamW step in float64: the reference for optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdamWStep:
    """Result of one step: the new weight and moments, float64."""

    weight: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def adamw_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor | None,
    exp_avg_sq: torch.Tensor | None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> AdamWStep:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2), decay decoupled, as torch.optim.AdamW does it.

    ``gradient``: after clipping. Moments before the step, None before the first. ``step`` counts from 1. All
    tensors of one shape, any float dtype.
    """
    w, g = weight.double(), gradient.double()
    m = torch.zeros_like(g) if exp_avg is None else exp_avg.double()
    v = torch.zeros_like(g) if exp_avg_sq is None else exp_avg_sq.double()
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return AdamWStep(w - lr * weight_decay * w - lr * m_hat / (v_hat.sqrt() + eps), m, v)
