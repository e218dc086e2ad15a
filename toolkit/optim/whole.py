"""Whole tensors of sharded parameters, for optimizers whose update of an element depends on others."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered where it is sharded; every rank calls it."""
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def part_of(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole ``tensor``, sharded as ``like`` is, without communication."""
    part = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.device)  # type: ignore[return-value]  # offloaded parameters are on the host
