"""A weight packed in NF4 with double quantisation, by bitsandbytes; and a base packed once for all ranks.

One thread takes minutes for an 8B model; if every rank packed all layers, they would compete for the same cores. So
each packs some layers on its CPU and sends them to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BLOCK, NESTED = 64, 256
"""Weights that share a statistic; statistics that share one themselves (section 3 of the paper)."""


def packed_nf4(weight: torch.Tensor, storage: torch.dtype, nested: bool = True) -> tuple[torch.Tensor, Any]:
    """A weight in 4 bits and the statistics that unpack it, of blocks of 64, if ``nested`` themselves in 8 bits by 256.

    As one row: on a CPU with AVX-512, bitsandbytes 0.50.2 unpacks rows that are no multiple of 64 long with the sizes
    of other blocks (40 % off where 9 % is right; rows of 32). With two axes: for a shape (n,) it gives (1, n), and its
    stand-in for compilers (n,), so that compiled blocks would end with «wrong number of dimensions»."""
    from bitsandbytes.functional import create_dynamic_map, name2qmap, quantize_4bit

    if "dynamic" not in name2qmap:
        # Kept for the process on the device of its first use: after a plan, on the meta device (bitsandbytes 0.50.2).
        with torch.device("cpu"):
            name2qmap["dynamic"] = create_dynamic_map()
    row = weight.reshape(1, -1)
    return quantize_4bit(row, blocksize=BLOCK, compress_statistics=nested, quant_type="nf4", quant_storage=storage)


def can_share() -> bool:
    """Whether there are other ranks, connected for tensors of the host."""
    return dist.is_initialized() and dist.get_world_size() > 1 and "cpu:" in dist.get_backend_config()


def packed_by_all(
    linears: Sequence[nn.Linear], storage: torch.dtype
) -> Iterator[tuple[nn.Linear, tuple[torch.Tensor, Any]]]:
    """Each layer with its packed weight and statistics, in an order that all ranks share; every rank calls it.

    Rank by rank, the largest first: layers that are packed at one time are of about one size, and each rank holds one
    that it has packed and not sent. What arrives has the bits that its own packing would have.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ordered = sorted(linears, key=lambda linear: -linear.weight.numel())
    for first in range(0, len(ordered), world):
        turn = ordered[first : first + world]
        mine = packed_nf4(turn[rank].weight.detach(), storage) if rank < len(turn) else None
        for owner, linear in enumerate(turn):
            packed = mine if owner == rank else _empty(linear.weight, storage)
            assert packed is not None
            for tensor in _contents(packed):
                dist.broadcast(tensor.view(-1).view(torch.uint8), src=owner)
            yield linear, packed


def _empty(weight: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Room for the packed ``weight`` and its statistics; tables and settings, which no weight changes, are there."""
    _, statistics = packed_nf4(weight.detach().flatten()[:BLOCK].contiguous(), storage)
    packed, sizes = packed_nf4(torch.empty(weight.numel(), dtype=weight.dtype, device="meta"), storage)
    statistics.shape = sizes.shape
    statistics.absmax = torch.empty_like(sizes.absmax, device="cpu")
    statistics.state2.absmax = torch.empty_like(sizes.state2.absmax, device="cpu")
    return torch.empty_like(packed, device="cpu"), statistics


def _contents(packed: tuple[torch.Tensor, Any]) -> list[torch.Tensor]:
    """All that the weight's values decide."""
    weight, statistics = packed
    return [weight, statistics.absmax, statistics.state2.absmax, statistics.offset]
