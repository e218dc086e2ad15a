"""Report a rank's failure to the user through the launcher, whose own output (and torchrun's) is kept off the
screen."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "TOOLKIT_FAILURES"
"""Environment variable: the folder where a failed rank writes its reason, so that it is shown once."""
SCREEN_VARIABLE = "TOOLKIT_SCREEN"
"""Environment variable: the file that is the user's screen, if the launcher's standard output is not."""


@dataclass(frozen=True)
class Failure:
    rank: int
    time: float
    message: str
    exit_code: int
    retryable: bool = True
    """Whether a restart may succeed."""
    cause: bool = False
    """Whether this is certainly the cause; a traceback may be a consequence of another rank's end."""
    attempt: int = 0
    """The attempt that failed, counted by torchrun's restarts."""
    memory: dict[str, float | None] | None = None
    """Of a rank that found no memory: ``device_gib`` and ``address_gib`` of ``OutOfMemory``."""


def note_failure(
    rank: int,
    message: str,
    exit_code: int,
    *,
    retryable: bool = True,
    cause: bool = False,
    memory: dict[str, float | None] | None = None,
) -> bool:
    """Write the reason for the launcher. False if there is no launcher to read it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return False
    entry: dict[str, Any] = {
        "rank": rank,
        "time": time.time(),
        "message": message,
        "exit_code": exit_code,
        "retryable": retryable,
    }
    entry["cause"] = cause or not retryable
    entry["memory"] = memory
    entry["attempt"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    writing = Path(folder) / f".rank{rank}"
    writing.write_text(json.dumps(entry), encoding="utf-8")
    writing.rename(Path(folder) / f"rank{rank}.json")
    return True


def first_failure(folder: Path) -> Failure | None:
    """The earliest failure of the last attempt; those of other ranks are its consequences."""
    failures = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
    return min(failures, key=lambda failure: (-failure.attempt, failure.time), default=None)


def nonretryable_exit_code() -> int | None:
    """Exit code of an earlier attempt's failure that a restart cannot fix (the recipe, the data, the loss); None if
    there is none."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return None
    failure = first_failure(Path(folder))
    return failure.exit_code if failure and not failure.retryable else None


CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
"""Signals of which Python's faulthandler writes where in Python the process was."""


def last_words(log: Path) -> str:
    """What a process that crashed in native code has left in its log, since it can report nothing itself; as the end of
    a message: what it said last (the C library, of a broken heap), and where in Python it was. Empty where faulthandler
    has written nothing."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    before, fatal, after = text.rpartition("Fatal Python error: ")
    if not fatal:
        return ""
    said = next((line for line in reversed(before.splitlines()) if line.strip()), "")
    if said[:1].isspace() or "Warning: " in said:  # a warning of Python's, the code that gave it below it
        said = ""
    stack = after.rpartition("Current thread")[2]  # other threads may come first
    frame = next((line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")), "no Python code")
    return f" ({said + '; ' if said else ''}in {frame})"
