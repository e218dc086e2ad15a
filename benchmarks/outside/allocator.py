"""What a process takes beyond the bytes of its tensors: toolkit/planning/allocator.py's four numbers and its interval,
fitted to one half of the rows whose kernels a plan has and held against the other, and the halves swapped."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.outside.rows import GIB, Row
from toolkit.planning import allocator
from toolkit.planning.allocator import Parts

_NEAR = 0.93
"""A process that has more of its device than this has freed its cache: no size of a cache is fitted to it."""


@dataclass(frozen=True)
class Fit:
    """``transient``, ``lesser``, ``loss``, ``sharded``: as in toolkit/planning/allocator.py. ``low``, ``high``:
    measured by predicted, a twentieth and nineteen twentieths of the rows that it was fitted to. Each of them is
    predicted with numbers that are fitted to all the others, since its own would be nearer to it than to a new row
    (Barber et al., «Predictive inference with the jackknife+», Annals of Statistics 49, 2021)."""

    transient: float
    lesser: float
    loss: float
    sharded: float
    low: float = 1.0
    high: float = 1.0

    def expected(self, parts: Parts) -> float:
        """Bytes on a device that is large enough."""
        return parts.peak + parts.fixed + parts.kept(self.transient, self.lesser, self.loss, self.sharded)

    def interval(self, row: Row) -> tuple[float, float]:
        """GiB from and to, as `toolkit plan` has it with these numbers."""
        assert row.parts is not None
        most, device = self.expected(row.parts), row.device * GIB
        low = min(device, max(row.parts.peak, self.low * min(device, most)))
        return low / GIB, min(device, max(row.parts.peak, self.high * most)) / GIB


IN_PLAN = Fit(allocator.TRANSIENT, allocator.LESSER, allocator.LOSS, allocator.SHARDED, allocator.LOW, allocator.HIGH)


def shown(row: Row) -> float:
    """GiB that were measured of a whole process, or reserved, of which ``row.parts`` have neither context nor NCCL."""
    return row.measured if row.reserved else row.process


def fitted_half(row: Row) -> bool:
    """Whether a row is one of those that are fitted to."""
    return in_fitted_half(row.id)


def in_fitted_half(name: str) -> bool:
    """Whether a row of this id is of the half that is fitted to: by the id alone, so that the halves stay the same."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def fit(rows: Sequence[Row]) -> Fit:
    """Least squares of the relative errors over ``rows``: what a process has beyond its tensors, context and NCCL.
    Raises ValueError with less than twenty rows, of which no twentieth is one."""
    if len(rows) < 20:
        raise ValueError(f"{len(rows)} rows to fit an allocator to; at least 20 are needed")
    ratios = []
    for row in rows:
        assert row.parts is not None
        expected = _numbers([other for other in rows if other is not row]).expected(row.parts)
        if expected < row.device * GIB:
            ratios.append(shown(row) * GIB / expected)
    ends = statistics.quantiles(ratios, n=20)
    return replace(_numbers(rows), low=ends[0], high=ends[-1])


def _numbers(rows: Sequence[Row]) -> Fit:
    """The four numbers, without an interval."""
    import torch

    table, wanted = [], []
    for row in rows:
        parts = row.parts
        assert parts is not None
        if shown(row) >= _NEAR * row.device:
            continue
        tensors = parts.peak if row.reserved else row.measured * GIB
        table.append([size / tensors for size in (parts.transient, parts.lesser, parts.loss, GIB * parts.sharded)])
        wanted.append([(shown(row) * GIB - tensors - parts.fixed) / tensors])
    solved = torch.linalg.lstsq(torch.tensor(table, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))
    transient, lesser, loss, sharded = solved.solution[:, 0].tolist()
    return Fit(transient, lesser, loss, sharded * GIB)


def swapped(rows: Sequence[Row]) -> list[tuple[Row, Fit]]:
    """Every row with the numbers that were fitted to the half that it is not of."""
    halves = {side: [row for row in rows if fitted_half(row) == side] for side in (True, False)}
    fits = {side: fit(half) for side, half in halves.items()}
    return [(row, fits[not fitted_half(row)]) for row in rows]


def interval(row: Row) -> tuple[float, float]:
    """GiB that `toolkit plan` gives: of the process, or, where reserved bytes were measured, without the context."""
    return IN_PLAN.interval(row)
