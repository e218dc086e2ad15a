"""The errors of a command, each with one message that says what to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A place in a user's file; lines and columns count from 1."""

    file: str | Path
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        parts = [str(self.file), *(str(n) for n in (self.line, self.column) if n is not None)]
        return ":".join(parts)


class ToolkitError(Exception):
    """Base of every error that a command prints without a traceback."""

    exit_code = 1


class InputError(ToolkitError):
    """The input cannot be used: exit 2.

    ``problems`` has one line each, so that all mistakes of a file are reported together.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    @classmethod
    def at(cls, place: Place | None, key: str | None, message: str) -> InputError:
        """One problem, as ``file:line: key: message``; unknown parts are omitted."""
        return cls(": ".join(str(part) for part in (place, key, message) if part))


class RunFailed(ToolkitError):
    """A run failed, or a check did not pass: exit 1."""


class OutOfMemory(RunFailed):
    """A rank found no memory. ``device_gib``: the GPU's; None without one. ``address_gib``: what the process may map
    (``ulimit -v``); None without a limit."""

    def __init__(self, message: str, device_gib: float | None, address_gib: float | None = None) -> None:
        super().__init__(message)
        self.device_gib, self.address_gib = device_gib, address_gib


class Stopped(ToolkitError):
    """A signal stopped the run: exit 128 plus the signal's number, like a shell."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        self.exit_code = 128 + number


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the second where it ends in a colon; its class if it has none."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__
