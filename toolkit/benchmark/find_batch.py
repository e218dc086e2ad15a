"""Finds the largest micro-batch that fits: the plan's prediction, corrected by measured probes.

A probe trains two steps of full rows, the maximum of a micro-batch, in its own processes, so an out-of-memory error
leaves nothing behind. The global batch does not change: micro-batches are divisors of a process's part of it, and
accumulation is adapted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunFailed
from toolkit.planning.choice import Search
from toolkit.planning.hardware import GIB, Device
from toolkit.planning.time import Rates
from toolkit.recipe.resolve import Resolved

HEADROOM = 0.05
"""Fraction of the memory to keep free, as in `toolkit plan`, for fragmentation between shapes."""
TIME_LIMIT = 600.0
_OUT = "out of memory"

Measure = Callable[[Resolved, int], "int | None"]
"""Peak bytes of one process that trains so, the highest of all ranks; None if they do not fit into the bytes given.
Raises RunFailed if it fails for another reason."""


@dataclass(frozen=True)
class Probe:
    """One measurement. ``peak``: None if memory was not sufficient."""

    micro_size: int
    predicted: int
    peak: int | None


@dataclass
class Found:
    """``chosen``: the recipe with the largest micro-batch that was measured to fit, or None."""

    chosen: Resolved | None
    probes: list[Probe]
    usable: int
    candidates: list[int]

    def to_json(self) -> dict[str, Any]:
        best = self.chosen
        return {
            "usable_bytes": self.usable,
            "candidates": self.candidates,
            "probes": [{"micro_size": p.micro_size, "predicted_bytes": p.predicted, "peak_bytes": p.peak,
                        "fits": fits(p, self.usable)} for p in self.probes],
            "batch": None if best is None else {"micro_size": best.micro_size, "accumulation": best.accumulation},
            "global_size": None if best is None else best.global_size,
        }  # fmt: skip


def fits(probe: Probe, usable: int) -> bool:
    """Whether a probe fits."""
    return probe.peak is not None and probe.peak <= usable


def find_batch(
    asked: Resolved, memory: int, measure: Measure, say: Callable[[str], None], headroom: float = HEADROOM
) -> Found:
    """Find the largest micro-batch of ``asked`` for ``memory`` bytes per process, its global batch unchanged.

    Two probes settle it where the plan is right within a step of the sizes; where it is not, each further one is of the
    next size that the measurements so far leave open. Raises InputError if the model cannot be planned.
    """
    device = Device(asked.device, memory / GIB, 0, 0, 0, 0, "given")
    search = Search(asked, device, headroom, Rates())
    usable = search.usable
    per_process = asked.global_size // asked.data_size
    sizes = [size for size in range(1, per_process + 1) if per_process % size == 0]
    ways = {size: way for size in sizes if (way := search.variant({}, {}, size)) is not None}
    predicted = {size: search.candidate(way).peak for size, way in ways.items()}
    low, high = 0, len(sizes)  # sizes[:low] are known to fit, sizes[high:] not to
    probes: list[Probe] = []
    while low < high:
        at = _next(sizes, predicted, probes, usable, low, high)
        probe = Probe(sizes[at], predicted[sizes[at]], measure(ways[sizes[at]], usable))
        probes.append(probe)
        say(describe(probe, usable))
        if fits(probe, usable):
            low = at + 1
        else:
            high = at
        if low < high and low and not _open(sizes[low], predicted, probes, usable):
            break  # by the measurements the next size is too much
    return Found(ways[sizes[low - 1]] if low else None, probes, usable, sizes)


def _next(sizes: list[int], predicted: dict[int, int], probes: list[Probe], usable: int, low: int, high: int) -> int:
    """The largest size still open that should fit; else the smallest."""
    right = [at for at in range(low, high) if _corrected(sizes[at], predicted, probes) <= usable]
    if len(probes) > 1 and not any(probe.peak is not None for probe in probes):
        return (low + high) // 2  # the plan is far off, and nothing says by how much
    return max(right, default=low)


def _open(size: int, predicted: dict[int, int], probes: list[Probe], usable: int) -> bool:
    return len([p for p in probes if p.peak is not None]) < 2 or _corrected(size, predicted, probes) <= usable


def _corrected(size: int, predicted: dict[int, int], probes: list[Probe]) -> float:
    """The prediction, off by as much as it was at the nearest size that was measured. Where the memory did not suffice
    nothing is known but that."""
    measured = [probe for probe in probes if probe.peak is not None]
    if not measured:
        return predicted[size]
    near = min(measured, key=lambda probe: abs(probe.micro_size - size))
    assert near.peak is not None
    # What is missing in a prediction is mostly of the activations, and grows with them.
    return predicted[size] * near.peak / near.predicted


def describe(probe: Probe, usable: int) -> str:
    """One line for the screen."""
    seen = _OUT if probe.peak is None else f"{probe.peak / GIB:.3f} GiB"
    verdict = "fits" if fits(probe, usable) else "does not fit"
    told_plan = f"predicted {probe.predicted / GIB:.3f}"
    return f"  micro_size {probe.micro_size}: {seen} of {usable / GIB:.3f} ({told_plan}), {verdict}"


# ---------------------------------------------------------------------- measuring


def measured_in_processes(log: Path) -> Measure:
    """Runs each probe in its own process group."""

    def measure(way: Resolved, usable: int) -> int | None:
        from toolkit.benchmark.job import Order
        from toolkit.launch.group import JobFailed, WorkerGroup
        from toolkit.machine import cpu_count

        values = way.recipe.model_dump(mode="json")
        # Two micro-batches are as much as many: the second meets the first one's gradients.
        few = min(2, way.accumulation)
        values["batch"] = {"micro_size": way.micro_size, "accumulation": few, "global_size": None}
        counted = way.device == "cpu"
        order = Order(values, way.source, way.device, 1, 1, full=True, counted=counted, limit=usable)
        with WorkerGroup(way.world_size, max(1, cpu_count() // way.world_size), log=log.absolute()) as group:
            try:
                return max(group.run(probe_job, order, timeout=TIME_LIMIT))
            except JobFailed as error:
                if _OUT in str(error) or "exit code -9" in str(error):
                    return None
                raise RunFailed(f"micro_size {way.micro_size} failed: {str(error).strip().splitlines()[-1]}") from None

    return measure


def probe_job(order: Any) -> int:
    """On a rank: bytes at the peak. Raises MemoryError where they do not suffice, so that no rank waits for this."""
    from toolkit.benchmark.job import turn_job

    turn = turn_job(order)
    if turn.out_of_memory is not None:
        raise MemoryError(f"{_OUT}: {turn.out_of_memory}")
    peak = turn.peak_reserved if turn.peak_reserved is not None else turn.peak_allocated
    assert peak is not None
    return peak


def memory_here(asked: Resolved, gib: float | None) -> int:
    """Bytes for one process: as given, else the memory of its device."""
    if gib is not None:
        if gib <= 0:
            raise InputError(f"--memory {gib:g}: GiB per process must be above 0")
        return int(gib * GIB)
    if asked.device == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // asked.recipe.machine.processes
