"""Suggests the closest known word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.8) -> str | None:
    """The closest known word; None if none is close enough."""
    lowered = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


def meant(word: str | None) -> str:
    """``; did you mean "x"?``, or nothing."""
    return f'; did you mean "{word}"?' if word else ""
