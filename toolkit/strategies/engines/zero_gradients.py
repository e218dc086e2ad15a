"""A trained weight that no row of a step reaches has a gradient of zeros, under every strategy and in the plain loop.

It decays, and its moments do, as in a loop with ``zero_grad(set_to_none=False)``. DeepSpeed and FSDP know no other way;
torch's default leaves it alone, on the ranks that have not reached it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def fill_missing(parameters: Iterable[torch.Tensor]) -> None:
    """Give those that have no gradient one of zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def with_zeros(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """``loss`` (a scalar), whose backward reaches every one of ``weights`` besides, with zeros: for engines that wait
    for each weight's gradient, or exchange those that a rank has."""
    return _Zeros.apply(loss, *weights) if weights else loss


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.weights = weights
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *outer, *map(torch.zeros_like, ctx.weights)
