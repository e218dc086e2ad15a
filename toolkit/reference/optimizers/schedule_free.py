"""Schedule-free AdamW (Defazio et al., arXiv:2405.15682, algorithm 1), with x computed as such."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.reference.optimizers.base import After, Formula, Tensors, terms


@dataclass(frozen=True)
class ScheduleFree(Formula):
    """The weight is y = (1 - beta1) z + beta1 x. With n the second moment's bias-corrected root plus eps:

    z_t = z_{t-1} - lr (g / n + decay y); x_t = (1 - c_t) x_{t-1} + c_t z_t, where c_t is the square of the learning
    rate divided by the sum of the squares of all until then (schedulefree 1.4.1, ``weight_lr_power=2``, ``r=0``).
    """

    betas: tuple[float, float]
    eps: float
    warmup: int = 0
    keys = ("z", "exp_avg_sq")

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> ScheduleFree:
        return cls((settings.betas[0], settings.betas[1]), settings.eps)

    def warmed_up(self, updates: int) -> ScheduleFree:
        return replace(self, warmup=updates)

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        y, g, (beta1, beta2) = weight.to(dtype), gradient.to(dtype), self.betas
        z = y if state is None else state["z"].to(dtype)
        v = (1 - beta2) * g * g
        if state is not None:
            v = v + beta2 * state["exp_avg_sq"].to(dtype)
        x, c = self.average(y, z), self.share(count)
        z = z - lr * (g / ((v / (1 - beta2**count)).sqrt() + self.eps) + weight_decay * y)
        x = (1 - c) * x + c * z
        return After((1 - beta1) * z + beta1 * x, {"z": z, "exp_avg_sq": v})

    def share(self, count: int) -> float:
        """c of update ``count``, from 1."""
        weights = [(min(at, self.warmup) / self.warmup) ** 2 if self.warmup else 1.0 for at in range(count)]
        return weights[-1] / sum(weights) if sum(weights) else 1.0

    def average(self, weight: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """x, in the dtype of the weight."""
        return (weight - (1 - self.betas[0]) * z) / self.betas[0]

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        if key == "z":  # what a step adds to it has at most a few roundings of its own, which ``correct`` shows
            return (weight if before is None else before["z"]).double().abs()
        return terms(None if before is None else before[key], gradient * gradient, self.betas[1])

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        # torch has none: every operation of two forms of the step rounded to the weight's dtype, x not stored in one.
        yield self.step(weight, gradient, state, count=count, lr=lr, weight_decay=weight_decay, dtype=weight.dtype)
        (beta1, beta2), c = self.betas, self.share(count)
        y, g = weight, gradient.to(weight.dtype)
        z = y if state is None else state["z"].to(y.dtype)
        v = torch.zeros_like(g) if state is None else state["exp_avg_sq"].to(y.dtype)
        v = v.mul(beta2).addcmul(g, g, value=1 - beta2)
        direction = g.div(v.sqrt().div((1 - beta2**count) ** 0.5).add(self.eps)).add(y, alpha=weight_decay)
        moved = y.lerp(z, c).sub(direction, alpha=lr * (1 - beta1 * (1 - c)))
        yield After(moved, {"z": z.sub(direction, alpha=lr), "exp_avg_sq": v})
