"""What a recipe under DeepSpeed ZeRO decides: sizes of buckets, for the launch files, engine and memory models."""

from __future__ import annotations

from dataclasses import dataclass


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
