"""The JSON result of a command: the fields that all commands share."""

from __future__ import annotations

import functools
import json
import platform
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.errors import InputError

_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft")


@functools.cache
def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the numbers; None if one is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


class Result:
    """Started when a command starts; ``finish`` gives the common fields with the command's own."""

    def __init__(self, command: str, schema_version: int = 1) -> None:
        self.command = command
        self.schema = f"toolkit.{command}/{schema_version}"
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._clock = time.perf_counter()

    def finish(self, *, recipe_sha256: str | None, device: str | None, **fields: Any) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "command": self.command,
            "recipe_sha256": recipe_sha256,
            "versions": versions(),
            "device": device,
            "started": self.started,
            "seconds": round(time.perf_counter() - self._clock, 3),
            **fields,
        }


@dataclass(frozen=True)
class CommandResult:
    """Base of what the Python API returns: the command's JSON and its exit status."""

    document: dict[str, Any] = field(repr=False)
    exit_code: int
    """0: done, equivalent, clean, fits; 1: the thing asked about is not so."""

    def to_json(self) -> dict[str, Any]:
        """The result as the command's ``--json`` writes it."""
        return self.document


def write_json(result: dict[str, Any], target: str) -> None:
    """Write to a file, or to standard output for ``-``. Raises InputError for a file that cannot be written."""
    text = json.dumps(result, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
