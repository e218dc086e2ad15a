"""A cell, how it can end, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_evidence.machine import Device
from benchmarks.gpu_evidence.workers import Workers
from toolkit.verification.compare.measure import finite

Record = dict[str, Any]
"""What is written of a cell: part, cell, status, device, versions, command, started, seconds and the result."""


class Skipped(Exception):
    """This cell has nothing to run here; its message says why."""


@dataclass
class Setting:
    """What every cell is given. ``seconds``: how long the cell that runs may take."""

    device: Device
    tiny: bool
    workers: Workers
    seconds: float = 0.0
    finished: dict[str, Record] = field(default_factory=dict)
    """The part's cells that have ended, by name: some cells follow from others."""


@dataclass(frozen=True)
class Cell:
    """``run`` returns the result; one that has ``ok`` False is a failure with its numbers kept.

    ``usual``: seconds that it takes on a GPU; it is not started with less left. ``limit``: it is ended after these.
    """

    name: str
    run: Callable[[Setting], dict[str, Any]]
    usual: float = 20.0
    limit: float = 240.0


@dataclass(frozen=True)
class Part:
    """One file of ``parts/``. ``summarise``: fields of the summary."""

    name: str
    title: str
    cells: Callable[[Setting], list[Cell]]
    summarise: Callable[[Sequence[Record]], dict[str, Any]] = lambda records: {}


def cell_file(folder: Path, part: str, cell: str) -> Path:
    return folder / "cells" / part / f"{cell}.json"


def write(document: dict[str, Any], file: Path) -> None:
    """Whole or not at all: a process that is ended while it writes leaves the file as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(_spelled(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, file)


def _spelled(value: Any) -> Any:
    """JSON has no infinity and no NaN: a loss that is not finite is spelled, and does not end the part."""
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(inner) for inner in value]
    return finite(value) if isinstance(value, float) else value


def read_finished(folder: Path, part: str) -> dict[str, Record]:
    """The cells that have ended, from their files and from the summary of an earlier run (which may be all that was
    kept)."""
    found: dict[str, Record] = {}
    summary = folder / f"{part}.json"
    if summary.exists():
        found = {record["cell"]: record for record in json.loads(summary.read_text(encoding="utf-8"))["cells"]}
    for file in sorted((folder / "cells" / part).glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        found[record["cell"]] = record
    return found
