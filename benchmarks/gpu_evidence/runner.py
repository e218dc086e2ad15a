"""Runs a part: cell after cell, each result written when it is there, until all are done or the time is up."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Record, Setting, Skipped, cell_file, read_finished, write
from benchmarks.gpu_evidence.machine import Device
from benchmarks.gpu_evidence.workers import Workers
from toolkit.errors import InputError
from toolkit.results import versions

COMPLETE, FAILED, UNFINISHED = 0, 1, 3
_RESERVE = 5.0
"""Seconds of the part's time that no cell gets: to end processes and write the summary."""


@dataclass(frozen=True)
class Request:
    """The command line. ``only``: cells by name, shell patterns between commas. ``retry``: run those again that
    failed."""

    folder: Path
    device: Device
    tiny: bool = False
    minutes: float = 9.0
    only: str = "*"
    retry: bool = False
    threads: int | None = None

    def wants(self, cell: str) -> bool:
        return any(fnmatch.fnmatchcase(cell, pattern) for pattern in self.only.split(","))

    def command(self, part: str) -> str:
        """The line that makes a part again; without the folder, which means something on one machine only."""
        words = ["python -m benchmarks.gpu_evidence", part, f"--minutes {self.minutes:g}"]
        words += ["--tiny"] if self.tiny else []
        words += [] if self.device.is_gpu else ["--device cpu"]
        words += [f"--only '{self.only}'"] if self.only != "*" else []
        return " ".join(words)


def run_part(part: Part, request: Request) -> int:
    """Run what is left of ``part``; returns the exit status: 0 complete, 1 cells failed, 3 unfinished.

    Raises InputError where the folder holds what was measured on another device or in another size.
    """
    deadline = time.monotonic() + 60.0 * request.minutes - _RESERVE
    finished = read_finished(request.folder, part.name)
    _check_same(finished, request)
    setting = Setting(
        request.device,
        request.tiny,
        Workers(request.folder / "logs" / f"{part.name}.log", request.threads),
        finished=finished,
    )
    cells = part.cells(setting)
    _check_names(cells)
    wanted = [cell for cell in cells if request.wants(cell.name)]
    left = [cell for cell in wanted if _is_left(cell, finished, request.retry)]
    print(f"{part.name}: {len(left)} of {len(wanted)} cells to run on {request.device.name}", flush=True)
    try:
        for cell in left:
            if deadline - time.monotonic() < cell.usual or not _run(part, cell, setting, request, deadline):
                break
    finally:
        setting.workers.close()
        _write_summary(part, cells, finished, request)
    return _status(wanted, finished)


def _run(part: Part, cell: Cell, setting: Setting, request: Request, deadline: float) -> bool:
    """Run one cell and write its record; False where nothing more can run now."""
    given = deadline - time.monotonic()
    setting.seconds = min(cell.limit, given)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    ended = _end_of(cell, setting)
    seconds = time.monotonic() - clock
    if ended["status"] == "failed":
        # A rank that failed may still wait for another; what is left of the cell must not meet the next one.
        setting.workers.close()
    if given < cell.limit and seconds >= given - 1.0:
        return False  # the part's time ran out, not the cell's: whatever came of it, it is run again
    record: Record = {
        "schema": "gpu-evidence.cell/1",
        "part": part.name,
        "cell": cell.name,
        **ended,
        "tiny": request.tiny,
        "device": request.device.to_json(),
        "versions": versions(),
        "command": request.command(part.name),
        "started": started,
        "seconds": round(seconds, 2),
    }
    write(record, cell_file(request.folder, part.name, cell.name))
    setting.finished[cell.name] = record
    why = record.get("reason") or record.get("error") or ""
    print(f"  {cell.name:<44} {record['status']:<8} {seconds:6.1f} s  {why[:90]}", flush=True)
    if _context_lost():
        print("  the CUDA context of this process is lost: run the part again to continue", flush=True)
        return False
    gc.collect()
    return True


def _end_of(cell: Cell, setting: Setting) -> dict[str, Any]:
    """Status and result; whatever a cell raises is its own end and not the part's."""
    try:
        with _limited(setting.seconds):
            result = cell.run(setting)
    except Skipped as reason:
        return {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = "".join(traceback.format_exception(error))
        return {"status": "failed", "error": _private(lines[-1])[:400], "traceback": _private(where)[-2000:]}
    return {"status": "done" if result.get("ok", True) else "failed", "result": result}


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after ``seconds``, also where a cell computes in this process. Jobs of workers have the same
    limit of their own and end sooner, with a better message."""

    def over(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, over)
    before, _ = signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds + 2.0))
    clock = time.monotonic()
    try:
        yield
    finally:
        # Someone else's timer (a test's) continues from where it was.
        signal.setitimer(signal.ITIMER_REAL, max(0.1, before - (time.monotonic() - clock)) if before else 0.0)
        signal.signal(signal.SIGALRM, handler)


def _private(text: str) -> str:
    """Paths without what they are below of on this machine."""
    text = re.sub(r"\n\s*[~^]+(?=\n)", "", text)  # the carets below each line
    text = re.sub(r'(["\s(])/\S*?/(site-packages|toolkit|benchmarks|lib/python[\d.]+)/', r"\1\2/", text)
    return re.sub(r"/(?:root|home|tmp|work|usr|mnt)/\S*/", "", text)


def _context_lost() -> bool:
    """Whether a kernel's failure has made CUDA unusable in this process (a cell that compares here)."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _is_left(cell: Cell, finished: dict[str, Record], retry: bool) -> bool:
    record = finished.get(cell.name)
    return record is None or (retry and record["status"] == "failed")


def _check_same(finished: dict[str, Record], request: Request) -> None:
    here = (request.device.type, request.device.name, request.tiny)
    for record in finished.values():
        there = (record["device"]["type"], record["device"]["name"], record["tiny"])
        if there != here:
            earlier = f"{there[1]}{', tiny' if there[2] else ''}"
            raise InputError(f"--out {request.folder}: contains results of another run ({earlier}); set another folder")


def _check_names(cells: list[Cell]) -> None:
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names)), "two cells of one name"
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names), "a cell's name is a file's"


def _status(wanted: list[Cell], finished: dict[str, Record]) -> int:
    if any(cell.name not in finished for cell in wanted):
        return UNFINISHED
    return FAILED if any(finished[cell.name]["status"] == "failed" for cell in wanted) else COMPLETE


def _write_summary(part: Part, cells: list[Cell], finished: dict[str, Record], request: Request) -> None:
    records = [finished[cell.name] for cell in cells if cell.name in finished]
    statuses = [record["status"] for record in records]
    summary = {
        "schema": "gpu-evidence.part/1",
        "part": part.name,
        "title": part.title,
        "complete": len(records) == len(cells),
        "cells_planned": len(cells),
        **{status: statuses.count(status) for status in ("done", "failed", "skipped")},
        "tiny": request.tiny,
        "device": request.device.to_json(),
        "versions": versions(),
        "command": request.command(part.name),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        **part.summarise(records),
        "cells": records,
    }
    write(summary, request.folder / f"{part.name}.json")
