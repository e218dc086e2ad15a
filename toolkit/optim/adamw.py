"""AdamW, and the count of steps in the state of torch's optimizers."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.recipe.schema import Optimizer


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) over parameter groups."""
    if optimizer.rounding == "stochastic":
        from toolkit.optim import stochastic

        return stochastic.build(groups, optimizer)
    return torch.optim.AdamW(
        groups,
        lr=optimizer.lr,
        betas=(optimizer.betas[0], optimizer.betas[1]),
        eps=optimizer.eps,
        fused=fused and optimizer.kernel == "fused",
        foreach=True if optimizer.kernel == "foreach" else None,
    )


def step_count(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: int) -> torch.Tensor:
    """The count of steps for a parameter's state, float32, without dimensions, on the device where the optimizer keeps
    it: fused AdamW on the parameter's, the others on the host. They read it there in every step, so a count on a GPU
    would make the host wait for each parameter."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return torch.tensor(float(steps), device=parameter.device if fused else "cpu")
