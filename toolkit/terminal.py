"""What a terminal can show: its width, and whether it is to have colour. Imports the standard library alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_COLOURS = {"bold": "1", "soft": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_PIPE = 120
"""Columns where standard output is no terminal: a file or a pipe has no width."""


def width() -> int:
    """Columns of the terminal, or of COLUMNS."""
    return max(40, shutil.get_terminal_size((_PIPE, 24)).columns)


def fitted(line: str, columns: int) -> list[str]:
    """The line in lines of at most so many columns; what goes on is indented two further. Words are never cut."""
    if len(line) <= columns:
        return [line]
    own = len(line) - len(line.lstrip())
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * (own + 2), break_long_words=False, break_on_hyphens=False
    )


def cut(line: str, columns: int) -> str:
    """The line, or as much of it as fits, with «…» at the end."""
    return line if len(line) <= columns else f"{line[: columns - 1]}…"


def timed(seconds: float) -> str:
    """A step's time, with three digits of it: «12.3 s», «45.6 ms»."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{1000 * seconds:.3g} ms"


def coloured(out: Any) -> bool:
    """Whether to use colour: on a terminal, unless NO_COLOR is set (no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, on: bool = True) -> str:
    """The text in a colour of ``_COLOURS``; unchanged where ``on`` is false."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if on and text else text


Say = Callable[[str], None]


@contextlib.contextmanager
def working(doing: str, ended: Callable[[], bool] = lambda: False) -> Iterator[Say]:
    """Inside, the last line of a terminal says what is being done, and for how many seconds; what it gives changes the
    words. The line goes at the end, or when ``ended``, which is asked ten times a second. Nothing is shown where
    standard error is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda doing: None
        return
    words, over, began = [doing], threading.Event(), time.monotonic()

    def show() -> None:
        shown = ""
        while not over.is_set() and not ended():
            line = f"{words[-1]} … {time.monotonic() - began:.0f} s"[: width() - 1]
            if line != shown:
                print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            shown = line
            over.wait(0.1)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield words.append
    finally:
        over.set()
        thread.join()
