"""A way for the ranks to reach the user's screen that does not pass through their launcher's own output."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from toolkit.launch.failure import FOLDER_VARIABLE


@contextmanager
def screen(folder: Path) -> Iterator[str]:
    """The path of a file whose writes appear on this process's standard output, until the context ends.

    A terminal is named itself, so that a progress bar can draw on it. Anything else gets a named pipe in
    ``folder``: a second opening of a plain file would write over what others write through the first.
    """
    if sys.stdout.isatty():
        yield os.ttyname(sys.stdout.fileno())
        return
    pipe = folder / "screen"
    os.mkfifo(pipe)
    # Opened for writing too, so that it has no end before the last rank has written.
    handle = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    ended = threading.Event()
    relay = threading.Thread(target=_relay, args=(handle, ended), daemon=True)
    relay.start()
    try:
        yield str(pipe)
    finally:
        ended.set()
        relay.join(10)
        os.close(handle)


def _relay(handle: int, ended: threading.Event) -> None:
    while True:
        last = ended.is_set()
        ready, _, _ = select.select([handle], [], [], 0 if last else 0.05)
        if ready:
            sys.stdout.write(os.read(handle, 65536).decode(errors="replace"))
            sys.stdout.flush()
        elif last:
            return


_TAKEN = "screen-taken"


def take_screen(out: TextIO | None) -> None:
    """Called on rank 0 before it first writes to ``out``, the screen: the line of the command that has launched it ends
    (`toolkit.terminal.working`), which looks ten times a second."""
    if out is not None and out.isatty() and FOLDER_VARIABLE in os.environ:
        (Path(os.environ[FOLDER_VARIABLE]) / _TAKEN).touch()
        time.sleep(0.25)


def screen_taken(folder: Path) -> bool:
    """Whether rank 0 writes to the screen; also after a failure, whose message it writes itself."""
    return (folder / _TAKEN).exists()
