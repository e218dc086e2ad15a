"""Adafactor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.optim.each import EachParameter, part_of, whole
from toolkit.recipe.schema import Optimizer


def build(groups: list[dict[str, Any]], optimizer: Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """torch's Adafactor over parameter groups; over DTensors one that gathers."""
    assert optimizer.beta2_decay is not None
    assert optimizer.clip_threshold is not None
    sharded = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    kind = ShardedAdafactor if sharded else torch.optim.Adafactor
    return kind(groups, lr=optimizer.lr, beta2_decay=optimizer.beta2_decay, d=optimizer.clip_threshold)


class ShardedAdafactor(EachParameter, torch.optim.Adafactor):  # type: ignore[misc]
    """Adafactor over DTensors: each weight and its gradient are gathered, updated whole by torch's own Adafactor, and
    this rank keeps its part. The state, a mean per row and column, is whole on every rank."""

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """A function of its own: what it gathered is freed before the next weight is gathered."""
        assert parameter.grad is not None
        gathered = torch.nn.Parameter(whole(parameter))
        gathered.grad = whole(parameter.grad)
        settings = {key: group[key] for key in ("lr", "beta2_decay", "eps", "d", "weight_decay")}
        one = torch.optim.Adafactor([gathered], **settings)
        if parameter in self.state:
            one.state[gathered] = self.state[parameter]
        one.step()
        self.state[parameter] = one.state[gathered]
        changed = gathered.detach()
        parameter.copy_(part_of(changed, parameter) if isinstance(parameter, DTensor) else changed)
