"""Lion (Chen et al., arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.recipe.schema import Optimizer


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """Lion over parameter groups; it has no fused kernel."""
    return Lion(groups, lr=optimizer.lr, betas=(optimizer.betas[0], optimizer.betas[1]))


class Lion(torch.optim.Optimizer):
    """``state[p]``: ``exp_avg``, in the dtype of the parameter. torch has none; bitsandbytes' knows no DTensor."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                moment = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(moment.lerp(gradient, 1 - beta1).sign_(), alpha=-lr)
                moment.lerp_(gradient, 1 - beta2)
