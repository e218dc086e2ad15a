"""Supervise a running job: forward signals to the ranks, end stuck ranks, and wait for the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from toolkit.launch.failure import first_failure
from toolkit.launch.signals import handled, noted_ranks

_GRACE_S = 10.0
"""Seconds that the other ranks get after one reported a failure, and all get after a second signal."""


class Asked:
    """Signals that this process received, by number, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, lambda n, _: self.numbers.append(n)) for number in handled()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def wait(job: subprocess.Popen[bytes], shared: Path, asked: Asked, look: Callable[[], None]) -> int:
    """Wait until the job ends. The first signal is forwarded to the ranks, which finish their step and save; a second
    one ends them.

    ``look``: called at every turn, ten a second. ``job`` runs in its own session, so that only this process receives a
    terminal's Ctrl-C.
    """
    passed, failed_at = 0, 0.0
    while True:
        look()
        try:
            return job.wait(0.1)
        except subprocess.TimeoutExpired:
            pass
        if len(asked.numbers) > passed:
            if passed == 0:
                _pass_on(job, shared, asked.numbers[0])
            else:
                return _end(job, shared)
            passed = len(asked.numbers)
        failure = first_failure(shared)
        ranks = noted_ranks(shared)
        stuck = {rank for rank, note in ranks.items() if failure and note["attempt"] == failure.attempt}
        if not stuck:
            failed_at = 0.0
        elif not failed_at:
            failed_at = time.monotonic()
        elif time.monotonic() - failed_at > _GRACE_S:
            # A rank that hangs does not answer torchrun's SIGTERM either; torchrun would wait 30 s for it.
            for rank in stuck:
                _send(ranks[rank]["pid"], signal.SIGKILL)


def _pass_on(job: subprocess.Popen[bytes], shared: Path, number: int) -> None:
    ranks = noted_ranks(shared)
    for note in ranks.values():
        _send(note["pid"], number)
    if not ranks:
        job.send_signal(signal.SIGTERM)  # training has not started


def _end(job: subprocess.Popen[bytes], shared: Path) -> int:
    """Kill the job at once, torchrun's agent first: it would restart the ranks."""
    job.kill()
    for note in noted_ranks(shared).values():
        _send(note["pid"], signal.SIGKILL)
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")  # an interrupted progress bar has hidden the cursor
        sys.stdout.flush()
    return job.wait(_GRACE_S)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
