"""Muon (Jordan, kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982, algorithm 1) for hidden matrices,
AdamW for all other weights.

The iteration of Newton and Schulz is in bf16 by definition: its directions of small singular values are bf16's own
rounding. Momentum, decay and rate are in float64, and the iteration rounds each product to bf16 as the definition does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from toolkit.reference.optimizers.adamw import AdamW
from toolkit.reference.optimizers.base import After, Formula, Shown, Tensors, by_torch, own, terms

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's polynomial a X + b (X X') X + c (X X')^2 X."""

_SHAKEN = 2.0**-16
"""Relative change of the iteration's input in the draws that measure what rounding does to its result. A step in
float32 errs by about 2^-23, so it rounds one element in 2^15 to another bf16 number; this does so to one in 2^8."""
_DRAWS = 4


class Muon:
    """Chooses between the two formulas."""

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> Formula:
        """The formula of a weight of this ``shape``."""
        if not matrix:
            return AdamW.of(settings, shape, matrix)
        return MatrixMuon(settings.momentum, settings.nesterov, settings.ns_steps, settings.adjust_lr_fn)


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """An approximately orthogonal bf16 matrix with the singular vectors of ``matrix``, of any float dtype."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MatrixMuon(Formula):
    """b = momentum * b + (1 - momentum) * g; u = (1 - momentum) * g + momentum * b with Nesterov, else b;
    w = w - lr * decay * w - lr * r * newton_schulz(u), with r from the whole matrix's shape."""

    keys = ("momentum_buffer",)
    counts = False

    def __init__(self, momentum: float, nesterov: bool, ns_steps: int, adjust_lr_fn: str) -> None:
        self.momentum, self.nesterov, self.ns_steps, self.adjust = momentum, nesterov, ns_steps, adjust_lr_fn

    def rate(self, shape: torch.Size) -> float:
        """What the learning rate is multiplied by for a matrix of this shape."""
        rows, columns = shape
        return (
            0.2 * math.sqrt(max(rows, columns)) if self.adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5
        )

    def direction(self, gradient: torch.Tensor, state: Tensors | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The momentum after the step, and what is orthogonalised; float64."""
        g, mu = gradient.double(), self.momentum
        kept = 0.0 if state is None else mu * state["momentum_buffer"].double()
        buffer = kept + (1 - mu) * g
        return buffer, ((1 - mu) * g + mu * buffer if self.nesterov else buffer)

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        buffer, update = self.direction(gradient, state)
        return After(self._moved(weight, update, lr, weight_decay), {"momentum_buffer": buffer})

    def _moved(self, weight: torch.Tensor, update: torch.Tensor, lr: float, weight_decay: float) -> torch.Tensor:
        w = weight.double()
        return w - lr * weight_decay * w - lr * self.rate(w.shape) * newton_schulz(update, self.ns_steps).double()

    def shown(
        self, weight: torch.Tensor, before: Tensors | None, after: Tensors, *, count: int, weight_decay: float
    ) -> Shown:
        moved = after["momentum_buffer"].double()
        if before is not None:
            moved = moved - self.momentum * before["momentum_buffer"].double()
        return Shown("momentum_buffer", moved, 1 - self.momentum)

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        return terms(None if before is None else before[key], gradient, self.momentum)

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        copy = weight.clone()
        optimizer = torch.optim.Muon(
            [copy], lr=lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=weight_decay,
            ns_steps=self.ns_steps, adjust_lr_fn=self.adjust,
        )  # fmt: skip
        yield by_torch(optimizer, copy, gradient, own(state, weight.dtype), self.keys)
        buffer, update = self.direction(gradient, state)
        draw = torch.Generator().manual_seed(0)
        rounded = {"momentum_buffer": buffer.to(weight.dtype)}
        for _ in range(_DRAWS):
            off = 1 + _SHAKEN * (2 * torch.rand(update.shape, generator=draw, dtype=torch.float64) - 1)
            yield After(self._moved(weight, update * off, lr, weight_decay).to(weight.dtype), rounded)
