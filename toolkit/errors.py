"""The two ways a command may end badly, each with one message that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where in a user's file something stands; lines and columns count from 1."""

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
    """What the user gave cannot be used: exit 2.

    ``problems`` holds one line each, so that all of a file's mistakes are told at once.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    @classmethod
    def at(cls, place: Place | None, key: str | None, message: str) -> InputError:
        """One problem, as ``file:line: key: message``; parts that are not known are left out."""
        return cls(": ".join(str(part) for part in (place, key, message) if part))


class RunFailed(ToolkitError):
    """The thing asked about is not so (a run failed, a strategy did not engage): exit 1."""


class Stopped(ToolkitError):
    """A run that was asked to stop has: exit 128 and the signal's number, as a shell says it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number
        self.exit_code = 128 + number
