"""The largest size that fits, by few tries."""

from __future__ import annotations

import math
from collections.abc import Callable

_HALVED = 6
"""Of so many tries one halves what is open."""


def largest(over: Callable[[int], float], highest: int, first: int = 1) -> int:
    """The largest size from 1 to ``highest`` that fits, ``over`` saying by how much each is too large (0 or less: it
    fits), all smaller ones too; 0 if 1 does not. Bytes grow about in proportion, so a line through the two sizes next
    to the answer says where to look; where that takes long, the rest is halved. ``first``: where to begin."""
    low, high = 0, highest + 1
    known: dict[int, float] = {}
    size = max(1, min(first, highest))
    while high - low > 1:
        known[size] = over(size)
        low, high = (size, high) if known[size] <= 0 else (low, size)
        size = (low + high) // 2 if len(known) % _HALVED == 0 else _where_line_ends(known, low, high, size)
        size = min(max(size, low + 1), high - 1)
    return low


def _where_line_ends(known: dict[int, float], low: int, high: int, last: int) -> int:
    """The largest size that fits by the two known ones nearest to the answer; with one, twice or half of it."""
    if len(known) == 1:
        return 2 * last if low == last else last // 2
    one, two = sorted(sorted(known, key=lambda size: min(abs(size - low), abs(size - high)))[:2])
    slope = (known[two] - known[one]) / (two - one)
    return math.floor(one - known[one] / slope) if slope > 0 else (low + high) // 2
