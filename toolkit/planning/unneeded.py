"""Packages that a plan does not need but that others import if they are installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """Packages of these names are not found while this lasts; one that is imported already stays.

    PEFT 0.21.2 imports bitsandbytes for quantised layers of its own, whatever the adapter is: 0.8 s of a plan's 3.
    None in `sys.modules` is Python's own word for a module that is not to be imported.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
