"""A way for the ranks to reach the user's screen that does not pass through their launcher's own output."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
