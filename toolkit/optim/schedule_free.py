"""Schedule-free AdamW (Defazio et al., arXiv:2405.15682, algorithm 1, with the weights of schedulefree 1.4.1).

The parameters are y, where gradients are computed; the state has z and the second moment. With g the gradient divided
by the root of the second moment, plus the decayed y:

    z' = z - lr g
    x' = (1 - c) x + c z'
    y' = (1 - beta1) z' + beta1 x' = (1 - c) y + c z - lr (1 - beta1 (1 - c)) g

x is not stored: it is (y - (1 - beta1) z) / beta1.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.optim.adamw8bit import local
from toolkit.optim.each import EachParameter
from toolkit.recipe.schema import Optimizer


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """Schedule-free AdamW over parameter groups; it has no fused kernel. Each group has ``warmup``, the updates of the
    schedule's warm-up."""
    betas = (optimizer.betas[0], optimizer.betas[1])
    return ScheduleFreeAdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)


class ScheduleFreeAdamW(EachParameter, torch.optim.Optimizer):  # type: ignore[misc]
    """``state[p]``: ``step``, ``z`` and ``exp_avg_sq``, the last two in the dtype of the parameter. ``step`` changes
    ``grad``."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "warmup": 0})

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["z"] = parameter.detach().clone()
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        count, (beta1, beta2), lr = int(state["step"].item()), group["betas"], group["lr"]
        y, gradient, z, v = (local(t) for t in (parameter, parameter.grad, state["z"], state["exp_avg_sq"]))
        share = share_of_last(count, group["warmup"])
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = (v / (1 - beta2**count)).sqrt_().add_(group["eps"])
        torch.div(gradient, step, out=step)
        if group["weight_decay"]:
            step.add_(y, alpha=group["weight_decay"])
        y.lerp_(z, share).add_(step, alpha=lr * (beta1 * (1 - share) - 1))
        z.sub_(step, alpha=lr)


def share_of_last(count: int, warmup: int) -> float:
    """c: the weight in the average of the update ``count`` (from 1), as a share of all weights up to it.

    The weight is the square of the learning rate, so that steps of the warm-up count less: 0, 1, 4, ... ``warmup``^2,
    and ``warmup``^2 for all later ones. A first step with a rate of 0 changes nothing; its share is 1.
    """
    behind = count - 1
    if warmup == 0 or behind == 0:
        return 1 / count if warmup == 0 else 1.0
    if behind < warmup:
        return 6 * behind / ((behind + 1) * (2 * behind + 1))  # k^2 / (1 + 4 + ... + k^2)
    squares = (warmup - 1) * warmup * (2 * warmup - 1) // 6
    return warmup**2 / (squares + (behind - warmup + 1) * warmup**2)


def averaged(y: torch.Tensor, z: torch.Tensor, beta1: float) -> torch.Tensor:
    """x, of two tensors of one shape and dtype: what the optimizer's weights are evaluated and exported as."""
    return torch.lerp(y, z, 1 - 1 / beta1)
