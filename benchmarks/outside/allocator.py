"""What a process takes beyond the bytes of its tensors: toolkit/planning/allocator.py's three numbers and its interval,
fitted again to one half of the rows and held against the other and against another source."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.outside.rows import GIB, Row
from toolkit.planning import allocator


@dataclass(frozen=True)
class Fit:
    """``fixed`` in bytes, ``transient`` and ``loss``: as in toolkit/planning/allocator.py. ``low``, ``high``: measured
    by predicted, a twentieth and nineteen twentieths of the rows that it was fitted to."""

    fixed: float
    transient: float
    loss: float
    low: float
    high: float


IN_PLAN = Fit(allocator.FIXED, allocator.TRANSIENT, allocator.LOSS, allocator.LOW, allocator.HIGH)


def fitted_half(row: Row) -> bool:
    """Whether a row is one of those that are fitted to."""
    return in_fitted_half(row.id)


def in_fitted_half(name: str) -> bool:
    """Whether a row of this id is of the half that is fitted to: by the id alone, so that the halves stay the same."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def fit(rows: Sequence[Row]) -> Fit:
    """Least squares of the relative errors over the half of ``rows`` that is fitted to: what the process has beyond the
    allocated bytes that were measured. Raises ValueError with less than twenty rows, of which no twentieth is one."""
    import torch

    half = [row for row in rows if fitted_half(row)]
    if len(half) < 20:
        raise ValueError(f"{len(half)} rows to fit an allocator to; at least 20 are needed")
    table, wanted = [], []
    for row in half:
        assert row.parts is not None
        scale = row.measured * GIB
        table.append([GIB / scale, row.parts.transient / scale, row.parts.loss / scale])
        wanted.append([(row.process - row.measured) / row.measured])
    solved = torch.linalg.lstsq(torch.tensor(table, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))
    gib, transient, loss = solved.solution[:, 0].tolist()
    made = Fit(gib * GIB, transient, loss, 1.0, 1.0)
    ratios = [row.process * GIB / expected(made, row) for row in half]
    ends = statistics.quantiles(ratios, n=20)
    return Fit(made.fixed, transient, loss, ends[0], ends[-1])


def expected(found: Fit, row: Row) -> float:
    """Bytes of the process that ``found`` gives, no more than the device has."""
    assert row.parts is not None
    total = row.parts.peak + found.fixed + found.transient * row.parts.transient + found.loss * row.parts.loss
    return min(total, row.device * GIB)


def interval(row: Row) -> tuple[float, float]:
    """GiB that `toolkit plan` gives: of the process, or, where reserved bytes were measured, without the context."""
    assert row.parts is not None
    context = allocator.CONTEXT if row.reserved else 0
    low, high = allocator.process_interval(row.parts, int(row.device * GIB) + context)
    return (low - context) / GIB, (high - context) / GIB
