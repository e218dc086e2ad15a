"""What a recipe under DeepSpeed ZeRO decides: sizes of buckets, for the launch files, engine and memory models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.recipe.resolve import Resolved


@dataclass(frozen=True)
class ZeroSettings:
    """Bucket sizes in elements, as DeepSpeed counts them."""

    stage: int
    reduce_bucket: int
    overlap: bool


@dataclass(frozen=True)
class Zero12Settings(ZeroSettings):
    """Stages 1 and 2 gather the updated weights in buckets."""

    allgather_bucket: int
    reduce_scatter: bool = True


@dataclass(frozen=True)
class Zero3Settings(ZeroSettings):
    """Stage 3 gathers weights when they are used, and does not shard those with fewer elements than the threshold."""

    prefetch_bucket: int
    persistence_threshold: int
    hpz: int = 1
    """Ranks that divide a second copy of the weights (ZeRO++, arXiv:2306.10209, hpZ); 1: there is none."""


def whole_sums(resolved: Resolved) -> bool:
    """Whether DeepSpeed 0.19.8 keeps a float32 gradient of every weight: stage 1 in mixed precision, nothing offloaded
    (bf16: BF16_Optimizer; fp16, on a GPU alone: ``grad_accum`` in stage_1_and_2.py)."""
    return resolved.settings.stage == 1 and resolved.precision.mixed and resolved.recipe.strategy.offload == "none"
