"""Ranks of a recorded job go on together, or stop recording together.

Reading a tensor that is split over ranks takes all of them: a rank that had stopped would leave the others in a
collective, and end the job. So they meet before each reading, in files of the recording's folder: a collective of our
own could be what one of them does not reach.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_S = 300.0
"""Seconds that a rank waits for one that does not come, and has not said that it stops: it may be loading."""
_POLL_S = 0.002
Value = TypeVar("Value")


class OthersStopped(Exception):
    """Another rank records no more."""


class Together:
    """One rank's side of the meetings in ``folder``, an empty one that all ranks have."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world, self.count = folder, rank, world, 0
        folder.mkdir(exist_ok=True)

    def meet(self) -> None:
        """Wait for every other rank. Raises OthersStopped, on all of them alike, if one stopped or does not come."""
        decision = self.folder / f"{self.count}.decision"
        (self.folder / f"{self.count}.{self.rank}").touch()
        until = time.monotonic() + PATIENCE_S
        while not decision.exists():
            if all((self.folder / f"{self.count}.{rank}").exists() for rank in range(self.world)):
                self._decide(decision, "go")
            elif time.monotonic() > until or any(self.folder.glob("stopped.*")):
                self._decide(decision, "stop")
            else:
                time.sleep(_POLL_S)
        self.count += 1
        if decision.read_text(encoding="utf-8") != "go":
            raise OthersStopped("another rank stopped recording")

    def _decide(self, decision: Path, word: str) -> None:
        """Whoever is first decides for all: whole files are linked, so that none is read half written."""
        mine = self.folder / f"{self.count}.{self.rank}.{word}"
        mine.write_text(word, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(mine, decision)

    @staticmethod
    def stop(folder: Path, rank: int) -> None:
        """Say that this rank comes to no meeting any more."""
        with contextlib.suppress(OSError):  # no disk: the others' patience ends
            folder.mkdir(exist_ok=True)
            (folder / f"stopped.{rank}").touch()


def read_each(items: Iterable[tuple[str, Any]], read: Callable[[Any], Value]) -> dict[str, Value]:
    """What ``read`` makes of each item. Where one fails the others are read all the same, since all ranks read them
    together; the first error is raised afterwards."""
    values: dict[str, Value] = {}
    failed: Exception | None = None
    for name, item in items:
        try:
            value = read(item)
        except Exception as error:
            failed = failed or error
            values.clear()
            continue
        if failed is None:
            values[name] = value
    if failed is not None:
        raise failed
    return values
