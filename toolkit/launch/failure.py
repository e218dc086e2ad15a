"""How the ranks reach the user past their launcher: its own noise is kept off the screen, and so is torchrun's."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "TOOLKIT_FAILURES"
"""Names the folder in which a failed rank leaves its reason, so that it is shown once."""
SCREEN_VARIABLE = "TOOLKIT_SCREEN"
"""Names a file that is the user's screen, where the launcher's own standard output is not."""


@dataclass(frozen=True)
class Failure:
    rank: int
    time: float
    message: str
    exit_code: int
    retryable: bool = True
    """Whether the same job may get further when it is started again."""
    cause: bool = False
    """Whether it is the cause for sure; a traceback may be the echo of another rank's end."""
    attempt: int = 0
    """Which start of the job it was, where torchrun's agent has started it again."""


def note_failure(rank: int, message: str, exit_code: int, *, retryable: bool = True, cause: bool = False) -> bool:
    """Leave the reason for the launcher; False where there is none to read it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return False
    entry = {"rank": rank, "time": time.time(), "message": message, "exit_code": exit_code, "retryable": retryable}
    entry["cause"] = cause or not retryable
    entry["attempt"] = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    writing = Path(folder) / f".rank{rank}"
    writing.write_text(json.dumps(entry), encoding="utf-8")
    writing.rename(Path(folder) / f"rank{rank}.json")
    return True


def first_failure(folder: Path) -> Failure | None:
    """The failure that came first, of the last start: those of other ranks are its echoes."""
    failures = [Failure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.json")]
    return min(failures, key=lambda failure: (-failure.attempt, failure.time), default=None)


def nonretryable_exit_code() -> int | None:
    """Exit code of an earlier start's failure that starting again does not cure: the recipe's, the data's, the loss's.
    None where there is none."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) is None:
        return None
    failure = first_failure(Path(folder))
    return failure.exit_code if failure and not failure.retryable else None
