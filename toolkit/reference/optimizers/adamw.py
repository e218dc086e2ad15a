"""One AdamW step in float64: the reference for optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.reference.optimizers.base import After, Formula, Shown, Tensors, by_torch, own, terms


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


class AdamW(Formula):
    """`adamw_step`, and torch's two implementations of it."""

    keys = ("exp_avg", "exp_avg_sq")

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self.betas, self.eps = betas, eps

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> AdamW:
        return cls((settings.betas[0], settings.betas[1]), settings.eps)

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        taken = adamw_step(
            weight,
            gradient,
            None if state is None else state["exp_avg"],
            None if state is None else state["exp_avg_sq"],
            step=count,
            lr=lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=weight_decay,
        )
        return After(taken.weight, {"exp_avg": taken.exp_avg, "exp_avg_sq": taken.exp_avg_sq})

    def shown(
        self, weight: torch.Tensor, before: Tensors | None, after: Tensors, *, count: int, weight_decay: float
    ) -> Shown:
        moved = after["exp_avg"].double()
        if before is not None:
            moved = moved - self.betas[0] * before["exp_avg"].double()
        return Shown("exp_avg", moved, 1 - self.betas[0])

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        kept, (beta1, beta2) = None if before is None else before[key], self.betas
        return terms(kept, gradient, beta1) if key == "exp_avg" else terms(kept, gradient * gradient, beta2)

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        for fused in (False, True):
            copy, kept = weight.clone(), own(state, weight.dtype)
            optimizer = torch.optim.AdamW(
                [copy], lr=lr, betas=self.betas, eps=self.eps, weight_decay=weight_decay, fused=fused, foreach=False
            )
            started = None if kept is None else {"step": torch.tensor(float(count - 1)), **kept}
            yield by_torch(optimizer, copy, gradient, started, self.keys)
