"""One AdamW step whose results are rounded to bfloat16 stochastically: the reference for `optimizer.rounding`.

Written apart from the optimizer's own kernel, with numpy's unsigned integers: the two agree on the definition alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from toolkit.reference.optimizers.adamw import AdamW
from toolkit.reference.optimizers.base import After, Formula, Tensors

_DIGITS = 7
"""Binary digits of a bfloat16 number behind the first."""
_LEAST = -126
"""Exponent of its smallest normal number."""


def random_halves(name: str, count: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three numbers from 0 to 65535 for each of ``size`` elements of a weight in its step ``count``, for the weight and
    its two moments."""
    digest = hashlib.blake2b(f"{name}\0{count}".encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, dtype="<u4")
    with np.errstate(over="ignore"):
        word = np.arange(size, dtype=np.uint32) + first
        word ^= word >> np.uint32(16)
        word *= np.uint32(0x7FEB352D)
        word ^= second
        word ^= word >> np.uint32(15)
        word *= np.uint32(0x846CA68B)
        word ^= word >> np.uint32(16)
    low, high = (word % 65536).astype(np.int64), (word // 65536).astype(np.int64)
    return low, high, (low + high) % 65536


class StochasticAdamW(AdamW):
    """`AdamW` in exact arithmetic; then each element goes to the bfloat16 number next to it in the direction of zero,
    or to the one after that if what is between, in 65536ths, and the element's random number exceed 65535."""

    def __init__(self, betas: tuple[float, float], eps: float, name: str = "") -> None:
        super().__init__(betas, eps)
        self.name = name

    def named(self, name: str) -> Formula:
        return StochasticAdamW(self.betas, self.eps, name)

    def mistakes(self, *before: Any, **settings: Any) -> list[tuple[str, After]]:
        exact = super().step(*before, **settings)
        nearest = After(exact.weight.bfloat16().double(), exact.moments)
        # The two numbers beside the exact one are apart by at most an eps of it.
        either = After(exact.weight, exact.moments, 2**-7 * exact.weight.abs())
        return [("nearest-not-stochastic", nearest), ("rounded-by-other-bits", either)]

    def step(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float, eps: float = 0.0, dtype: torch.dtype = torch.float64,
    ) -> After:  # fmt: skip
        exact = super().step(weight, gradient, state, count=count, lr=lr, weight_decay=weight_decay)
        error = self._error(weight, gradient, state, exact, count=count, lr=lr, eps=eps)
        return self._rounded(exact, count, error)

    def correct(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, *, count: int, lr: float,
        weight_decay: float,
    ) -> Iterator[After]:  # fmt: skip
        wide = None if state is None else {key: moment.float() for key, moment in state.items()}
        for after in super().correct(
            weight.float(), gradient.float(), wide, count=count, lr=lr, weight_decay=weight_decay
        ):
            yield self._rounded(after, count, None)

    def _error(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: Tensors | None, exact: After, *, count: int,
        lr: float, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        """By how much a step in float32 can be off before it is rounded, element by element. Its sixteen operations
        round by half a float32 ``eps`` each; the clipped gradient is off by ``eps``: half of it by its own rounding,
        half for the coefficient."""
        beta1, beta2 = self.betas
        single = 16 * torch.finfo(torch.float32).eps
        g = gradient.double().abs()
        m, v = exact.moments["exp_avg"], exact.moments["exp_avg_sq"]
        summed = (1 - beta1) * g + (0.0 if state is None else beta1 * state["exp_avg"].double().abs())
        off_m = eps * (1 - beta1) * g + single * summed
        off_v = 2 * eps * (1 - beta2) * g * g + single * v
        root = (v / (1 - beta2**count)).sqrt()
        below = root + self.eps
        off = off_m / (1 - beta1**count) / below
        # The derivative of the root is half of it over its square; where that is zero nothing is off.
        off += (m / (1 - beta1**count)).abs() / below * off_v / (2 * v).clamp(min=1e-300)
        return lr * off + single * (weight.double().abs() + exact.weight.abs())

    def _rounded(self, exact: After, count: int, error: torch.Tensor | None) -> After:
        halves = random_halves(self.name, count, exact.weight.numel())
        weight, slack = _round(exact.weight, halves[0], error)
        moments = {
            key: _round(exact.moments[key], half, None)[0] for key, half in zip(self.keys, halves[1:], strict=True)
        }
        return After(weight, moments, slack)


def _round(
    values: torch.Tensor, random: np.ndarray, error: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``values`` rounded, float64, and by how much each may be off where ``error`` decides which way it goes."""
    exact = values.double().abs()
    _, exponent = torch.frexp(exact)  # of a mantissa from 1/2 to 1
    digit = torch.ldexp(torch.ones_like(exact), (exponent - 1).clamp(min=_LEAST) - _DIGITS)
    below = (exact / digit).floor()
    part = exact / digit - below
    half = torch.from_numpy(random).view(values.shape).double() / 65536
    rounded = (below + (part + half >= 1)) * digit * values.double().sign()
    if error is None:
        return rounded, None
    near = (part + half - 1).abs() <= error / digit + 1 / 65536
    return rounded, torch.where(near, digit + error, torch.zeros_like(digit))
