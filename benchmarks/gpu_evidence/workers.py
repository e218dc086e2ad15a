"""The processes that cells run in: one on the device, and two that share it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.launch.group import WorkerGroup
from toolkit.machine import cpu_count

_START = 120.0
"""Seconds to import four packages and connect."""


class _Group(WorkerGroup):
    """A WorkerGroup that begins with a job of its own, also where it starts again after a failure."""

    def __init__(self, size: int, threads: int, log: Path, gloo: bool) -> None:
        # Both of two processes use GPU 0. NCCL refuses that («Duplicate GPU detected»), so they connect over gloo.
        super().__init__(size, threads, environment={"LOCAL_RANK": "0", "HF_HUB_OFFLINE": "1"})
        self._log, self._gloo = log, gloo

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        if not self._processes:
            super().run(_begin, str(self._log), self._gloo, timeout=_START)
        return super().run(job, *args, timeout=timeout)


class Workers:
    """``one``: a process alone, as it trains on one GPU (NCCL there). ``two``: two processes on the one device, over
    gloo. Both start at first use and serve many cells."""

    def __init__(self, log: Path, threads: int | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = threads or cpu_count()
        self.one = _Group(1, threads, log, gloo=False)
        self.two = _Group(2, max(1, threads // 2), log, gloo=True)

    def of(self, world: int) -> WorkerGroup:
        return self.one if world == 1 else self.two

    def close(self) -> None:
        self.one.close()
        self.two.close()


def _begin(log: str, gloo: bool) -> None:
    """What four packages say on every rank goes to a file, C++ included; and the connection is made, where it is not
    the one that accelerate would make."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if gloo:
        import torch

        torch.distributed.init_process_group("gloo")
