"""Evidence that QLoRA's base is stored in 4 bits: its bytes, counted on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.model.packed_layers import packed_layers
from toolkit.options.nf4.pack import BLOCK, NESTED
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim


def base_claims(
    model: nn.Module,
    bases: Mapping[str, int],
    resolved: Resolved,
    device: torch.device,
    blocks: Sequence[tuple[str, nn.Module]] = (),
) -> list[Claim]:
    """Evidence that the base is in 4 bits (NF4 in blocks of 64, doubly quantised unless its files say otherwise): how
    many of its ``bases`` (elements by name) and how many bits a weight takes, counted from the storage on all ranks.
    Every rank calls it. What every rank has whole of the model's ``blocks`` counts as if they divided it."""
    whole = {id(module) for _, block in blocks[: resolved.whole_blocks] for module in block.modules()}
    nested = resolved.stored is None or resolved.stored.nested
    layers = {name: layer for name, layer in packed_layers(model).items() if _right(layer.statistics, nested)}
    elements = sum(bases.values())
    spread = "weights" in resolved.traits.shards
    stored = torch.tensor(
        sum(
            _local_bytes(layer.weight) / (resolved.state_ranks if id(layer) in whole else 1)
            for layer in layers.values()
        ),
        dtype=torch.float64,
        device=device,
    )
    if spread and dist.is_initialized():
        dist.all_reduce(stored)
        stored /= resolved.world_size // resolved.state_ranks  # copies of the same part
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    bits = 8 * stored.item() / max(1, weights)
    statistics = 8 * sum(layer.statistics_bytes() for layer in layers.values()) / max(1, weights)
    tables = 8 * ((16 + 256 + 1) if nested else 16) * 4 * len(layers) / max(1, weights)
    # A shard is padded to a whole element on each rank.
    padding = 8 * len(layers) * resolved.state_ranks * 8 / max(1, weights)
    # 8 bits for 64 weights and 32 for 64 x 256 (the paper's 0.127), or 32 for 64; a layer's last block may be short.
    rest = len(layers) * (8 + 32) / max(1, weights)
    expected = 8 / BLOCK + 32 / (BLOCK * NESTED) if nested else 32 / BLOCK
    fits = 4 <= bits <= 4 + padding and statistics - tables <= expected + rest
    observed = f"{bits:.3f} + {statistics - tables:.3f}" if layers else "none are in NF4"
    return [
        Claim(
            "nf4-weights",
            "base weights in NF4" + (", doubly quantised" if nested else ""),
            f"{elements:,}",
            f"{weights:,}",
            weights == elements > 0,
        ),
        Claim(
            "nf4-bits",
            "bits of such a weight",
            f"4 + {expected:.3f}, and what pads a shard and a block",
            observed,
            fits,
        ),
    ]


def _right(statistics: Any, nested: bool) -> bool:
    return (
        statistics.quant_type == "nf4"
        and statistics.blocksize == BLOCK
        and statistics.absmax.dtype == (torch.uint8 if nested else torch.float32)
        and (statistics.state2 is not None) == nested
    )


def _local_bytes(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    local = getattr(parameter, "ds_tensor", local)
    return local.numel() * local.element_size()
