"""Adafactor (Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5), as torch.optim.Adafactor states it: the smallest
positive numbers bound denominators instead of being added to squares, and ``lr`` bounds the relative step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from toolkit.reference.optimizers.base import After, Formula, Tensors, by_torch, own

_LEAST_SIZE = 1e-3
"""Of a weight's root mean square, for the step relative to it: the paper's epsilon 2."""


class Adafactor(Formula):
    """With beta = 1 - count^decay: r and c are moving means of g^2 over columns and rows (of the last two dimensions),
    v = r c / mean(r); of a vector v is a moving mean of g^2. u = g / sqrt(v) / max(1, RMS(u) / threshold), and
    w = w - lr * decay * w - max(1e-3, RMS(w)) * min(lr, 1 / sqrt(count)) * u."""

    def __init__(self, shape: tuple[int, ...], beta2_decay: float, threshold: float) -> None:
        self.factored = len(shape) > 1
        self.keys = ("row_var", "col_var") if self.factored else ("variance",)
        self.beta2_decay, self.threshold = beta2_decay, threshold

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> Adafactor:
        return cls(shape, settings.beta2_decay, settings.clip_threshold)

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        w, g = weight.double(), gradient.double()
        new = count**self.beta2_decay
        size = max(_LEAST_SIZE, w.square().mean().sqrt().item()) * min(lr, 1 / math.sqrt(count))
        squares = self._squares(g)
        moments = {key: (0.0 if state is None else (1 - new) * state[key].double()) + new * squares[key]
                   for key in self.keys}  # fmt: skip
        least = torch.finfo(weight.dtype).eps
        if self.factored:
            rows = moments["row_var"]
            v = rows * moments["col_var"] / rows.mean(dim=-2, keepdim=True).clamp(min=least)
        else:
            v = moments["variance"]
        update = g / v.clamp(min=least * least).sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item() / self.threshold)
        return After(w - lr * weight_decay * w - size * update, moments)

    def _squares(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        square = gradient.square()
        if not self.factored:
            return {"variance": square}
        return {"row_var": square.mean(dim=-1, keepdim=True), "col_var": square.mean(dim=-2, keepdim=True)}

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        new = count**self.beta2_decay
        found = new * self._squares(gradient.double())[key]
        if before is not None:
            found = found + (1 - new) * before[key].double().abs()
        # A mean of n squares has the roundings of a pairwise sum more (Higham, 4.2); four are allowed for the rest.
        averaged = {"row_var": weight.shape[-1], "col_var": weight.shape[-2] if self.factored else 1}.get(key, 1)
        return found * (1 + math.log2(max(1, averaged)) / 2)

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        for foreach in (False, True):
            copy, kept = weight.clone(), own(state, weight.dtype)
            optimizer = torch.optim.Adafactor(
                [copy], lr=lr, beta2_decay=self.beta2_decay, d=self.threshold, weight_decay=weight_decay,
                foreach=foreach,
            )  # fmt: skip
            started = None if kept is None else {"step": torch.tensor(float(count - 1)), **kept}
            yield by_torch(optimizer, copy, gradient, started, self.keys)
