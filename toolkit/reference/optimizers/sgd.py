"""Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, as torch.optim.SGD states it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from toolkit.reference.optimizers.base import After, Formula, Shown, Tensors, by_torch, own, terms


class Sgd(Formula):
    """b = momentum * b + g + decay * w, and w = w - lr * b; with Nesterov w = w - lr * (g + decay * w + momentum * b).
    The first b is the gradient with its penalty."""

    counts = False

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self.keys = ("momentum_buffer",) if momentum else ()

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> Sgd:
        return cls(settings.momentum or 0.0, bool(settings.nesterov))

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        w = weight.to(dtype)
        pull = gradient.to(dtype) + weight_decay * w
        if not self.momentum:
            return After(w - lr * pull, {})
        kept = 0.0 if state is None else self.momentum * state["momentum_buffer"].to(dtype)
        buffer = kept + pull
        direction = pull + self.momentum * buffer if self.nesterov else buffer
        return After(w - lr * direction, {"momentum_buffer": buffer})

    def shown(
        self, weight: torch.Tensor, before: Tensors | None, after: Tensors, *, count: int, weight_decay: float
    ) -> Shown | None:
        if not self.momentum:
            return None
        moved = after["momentum_buffer"].double() - weight_decay * weight.double()
        if before is not None:
            moved = moved - self.momentum * before["momentum_buffer"].double()
        return Shown("momentum_buffer", moved, 1.0)

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        kept = None if before is None else before[key]
        return terms(kept, gradient, self.momentum, 1.0) + weight_decay * weight.double().abs()

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        for second in (False, True):
            copy = weight.clone()
            fused = second and weight.dtype == torch.float32  # wrong on a CPU in 16 bits (torch 2.13.0)
            optimizer = torch.optim.SGD(
                [copy], lr=lr, momentum=self.momentum, nesterov=self.nesterov, weight_decay=weight_decay, fused=fused,
                foreach=second and not fused,
            )  # fmt: skip
            yield by_torch(optimizer, copy, gradient, own(state, weight.dtype), self.keys)
