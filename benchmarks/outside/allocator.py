"""What a process takes beyond the bytes of its tensors, fitted on one half of the rows and told on the other.

The peak that nvidia-smi shows is a factor of ``max_memory_allocated``: the allocator's cache, fragmentation, the CUDA
context, NCCL's buffers. It depends on the order of allocations, which a plan does not have, so it is an interval.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.outside.rows import GIB, Row


@dataclass(frozen=True)
class Allocator:
    """``low``, ``middle``, ``high``: factors of the allocated bytes, a tenth, half and nine tenths of the rows that it
    was fitted on, or the least and the most."""

    low: float
    middle: float
    high: float

    def interval(self, allocated: float, device: float) -> tuple[float, float]:
        """GiB from and to; no more than the ``device`` has, where something is freed first."""
        return min(device, self.low * allocated), min(device, self.high * allocated)


def fitted_half(row: Row) -> bool:
    """Whether a row is one of those that are fitted to."""
    return in_fitted_half(row.id)


def in_fitted_half(name: str) -> bool:
    """Whether a row of this id is of the half that is fitted to: by the id alone, so that the halves stay the same."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def fit(rows: Sequence[Row], of: Callable[[Row], float] = lambda row: row.process) -> Allocator:
    """Quantiles of ``of`` (GiB) by the allocated bytes over the half of ``rows`` that is fitted to; the extremes, with
    less than ten of them. Raises ValueError with less than four."""
    factors = [of(row) / row.predicted * GIB for row in rows if fitted_half(row)]
    if len(factors) < 4:
        raise ValueError(f"{len(factors)} rows to fit an allocator to; at least 4 are needed")
    if len(factors) < 10:
        return Allocator(min(factors), statistics.median(factors), max(factors))
    tenths = statistics.quantiles(factors, n=10)
    return Allocator(tenths[0], tenths[4], tenths[8])
