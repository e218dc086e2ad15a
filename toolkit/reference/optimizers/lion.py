"""Lion (Chen et al., arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from toolkit.reference.optimizers.base import After, Formula, Shown, Tensors, terms

_ROUNDINGS = 8
"""Roundings of the interpolation's terms within which its sign is open: those of the clipped gradient, of two products
and of their sum, on either side."""


class Lion(Formula):
    """c = beta1 * m + (1 - beta1) * g; w = w - lr * (sign(c) + decay * w); m = beta2 * m + (1 - beta2) * g.

    Where c is smaller than its rounding either sign is right, and so is 0: there the weight may be off by up to twice
    the rate.
    """

    keys = ("exp_avg",)
    counts = False

    def __init__(self, betas: tuple[float, float]) -> None:
        self.betas = betas

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> Lion:
        return cls((settings.betas[0], settings.betas[1]))

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        w, g = weight.to(dtype), gradient.to(dtype)
        m = torch.zeros_like(g) if state is None else state["exp_avg"].to(dtype)
        beta1, beta2 = self.betas
        c = beta1 * m + (1 - beta1) * g
        open_sign = c.abs() < _ROUNDINGS * eps * terms(None if state is None else m, g, beta1).to(dtype)
        slack = torch.where(open_sign, 2 * lr, 0.0)
        return After(w - lr * weight_decay * w - lr * c.sign(), {"exp_avg": beta2 * m + (1 - beta2) * g}, slack)

    def shown(
        self, weight: torch.Tensor, before: Tensors | None, after: Tensors, *, count: int, weight_decay: float
    ) -> Shown:
        moved = after["exp_avg"].double()
        if before is not None:
            moved = moved - self.betas[1] * before["exp_avg"].double()
        return Shown("exp_avg", moved, 1 - self.betas[1])

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        return terms(None if before is None else before[key], gradient, self.betas[1])

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        # torch has no Lion: the formula with every operation rounded to the weight's dtype, in two orders.
        yield self.step(weight, gradient, state, count=count, lr=lr, weight_decay=weight_decay, dtype=weight.dtype)
        g = gradient.to(weight.dtype)
        m = torch.zeros_like(g) if state is None else state["exp_avg"].to(weight.dtype)
        moved = (weight * (1 - lr * weight_decay)).sub(m.lerp(g, 1 - self.betas[0]).sign(), alpha=lr)
        yield After(moved, {"exp_avg": m.lerp(g, 1 - self.betas[1])})
