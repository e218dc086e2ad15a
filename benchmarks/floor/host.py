"""Host time per micro-batch: a model so small that only the host works, in one process and in two."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.floor.loops import LOOPS, Work, llama
from benchmarks.floor.table import Row, timed
from toolkit.launch.group import WorkerGroup

QUIET = Path(os.devnull)
"""For what the Trainer prints; a failure is raised with its traceback."""
PEERS = ("bare", "toolkit", "trainer")
WARMUP = 3
LIMIT = 600.0
"""Seconds of one turn, far above what an idle machine needs."""


def turn_job(name: str, work: Work, steps: int) -> float:
    """Wall seconds per micro-batch of ``steps`` optimizer steps after the warm-up."""
    ended: list[float] = []
    LOOPS[name](work, WARMUP + steps, lambda: ended.append(time.perf_counter()))
    return (ended[-1] - ended[WARMUP - 1]) / (steps * work.accumulation)


def measure(quick: bool) -> list[Row]:
    """Peers in turns, each in processes of its own: they set torch's process group up in different ways."""
    turns, steps = (1, 2) if quick else (5, 40)
    rows = []
    for size in (1, 2):
        work = Work(llama(3, 48), rows=2, length=16, processes=size)
        groups = {name: WorkerGroup(size, log=QUIET) for name in PEERS}
        seconds: dict[str, list[float]] = {name: [] for name in PEERS}
        try:
            for _ in range(turns):
                for name, group in groups.items():
                    seconds[name].append(max(group.run(turn_job, name, work, steps, timeout=LIMIT)))
        finally:
            for group in groups.values():
                group.close()
        for name, goal in (("toolkit", 1.0), ("trainer", None)):
            pairs = list(zip(seconds[name], seconds["bare"], strict=True))
            text = f"{1e3 * min(seconds[name]):.2f} ms to {1e3 * min(seconds['bare']):.2f}, each its fastest turn"
            what = f"{name}, {size} process{'es' if size > 1 else ''}"
            rows.append(timed("host", what, [one / other for one, other in pairs], text, goal=goal))
    return rows
