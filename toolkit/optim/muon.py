"""Muon for hidden matrices and AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.errors import InputError
from toolkit.optim.each import EachParameter, part_of, whole
from toolkit.recipe.schema import Optimizer


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """Muon over the groups of hidden matrices, AdamW over the others. Raises InputError if torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise InputError(f"optimizer.name: muon requires torch 2.9 or later; {torch.__version__} is installed")
    return MuonWithAdamW(groups, optimizer, fused=fused)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and torch's AdamW over groups and state that they share with this optimizer.

    ``state[p]``: ``momentum_buffer`` of a hidden matrix; ``step``, ``exp_avg`` and ``exp_avg_sq`` of another weight.
    """

    def __init__(self, groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> None:
        super().__init__(groups, {})
        hidden = [group for group in self.param_groups if group["matrix"]]
        others = [group for group in self.param_groups if not group["matrix"]]
        self.parts: list[torch.optim.Optimizer] = []
        if hidden:
            muon = torch.optim.Muon
            if any(isinstance(parameter, DTensor) for group in hidden for parameter in group["params"]):
                muon = ShardedMuon
            assert optimizer.momentum is not None
            assert optimizer.ns_steps is not None
            self.parts.append(
                muon(
                    hidden,
                    lr=optimizer.lr,
                    weight_decay=0.0,
                    momentum=optimizer.momentum,
                    nesterov=bool(optimizer.nesterov),
                    ns_steps=optimizer.ns_steps,
                    adjust_lr_fn=optimizer.adjust_lr_fn,
                )
            )
        if others:
            betas = (optimizer.betas[0], optimizer.betas[1])
            adamw = torch.optim.AdamW(others, lr=optimizer.lr, betas=betas, eps=optimizer.eps, fused=fused)
            self.parts.append(adamw)
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for part in self.parts:
            part.step()


class ShardedMuon(EachParameter, torch.optim.Muon):  # type: ignore[misc]
    """Muon over DTensors: the momentum stays sharded; of each matrix the interpolated momentum is gathered,
    orthogonalised whole by torch's own Muon, and this rank's part of the result is added."""

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        moment, momentum = state["momentum_buffer"], group["momentum"]
        moment.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(moment, momentum) if group["nesterov"] else moment
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        change = orthogonalised(update, group)
        if isinstance(parameter, DTensor):
            change = part_of(change, parameter)
        parameter.add_(change)


def orthogonalised(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What torch's Muon adds to a matrix, whole, for this interpolated momentum (a DTensor or a whole tensor)."""
    gathered = whole(update)
    change = torch.nn.Parameter(torch.zeros_like(gathered))
    change.grad = gathered
    settings = {key: group[key] for key in ("lr", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")}
    torch.optim.Muon([change], weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()
    return change.detach()
