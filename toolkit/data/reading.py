"""How many rows are tokenised, for whoever shows it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.data.sources import Source

Told = Callable[[str, int, int | None], None]
"""Takes the recipe's key, the rows so far, and all of them, or None where that is not known."""
_TOLD: ContextVar[Told | None] = ContextVar("told", default=None)
_EVERY = 0.1
"""Seconds between two calls."""


@contextlib.contextmanager
def telling(told: Told) -> Iterator[None]:
    """Inside, ``told`` is called at most ten times a second while rows are tokenised, here or by the process that this
    one waits for."""
    token = _TOLD.set(told)
    try:
        yield
    finally:
        _TOLD.reset(token)


def counter(source: Source) -> Callable[[int], None]:
    """Takes the number of rows so far; does nothing outside ``telling``."""
    told = _TOLD.get()
    if told is None:
        return lambda rows: None
    total, after = source.count(), 0.0
    if total is not None and source.part is not None:
        fraction, held_out = source.part
        total = round(total * (fraction if held_out else 1 - fraction))

    def count(rows: int) -> None:
        nonlocal after
        if (now := time.monotonic()) >= after:
            after = now + _EVERY
            told(source.key, rows, None if total is None else max(rows, total))

    return count
