"""Optimizers that update one parameter after the other, and whole tensors of sharded parameters, for those whose update
of an element depends on others."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


class EachParameter:
    """``step`` of an optimizer that has ``_step(parameter, group)``: a function of its own for each parameter, so that
    what it gathers or unpacks is freed before the next one's turn."""

    param_groups: list[dict[str, Any]]

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient; every rank calls it."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered where it is sharded; every rank calls it."""
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def part_of(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole ``tensor``, sharded as ``like`` is, without communication."""
    part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.device)  # type: ignore[return-value]  # offloaded parameters are on the host
