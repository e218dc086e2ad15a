"""Pack samples into rows: best-fit decreasing, over all samples or over a part of a stream.

Arithmetic on lengths only, determined by the data and the seed, so that the position in the data follows from the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from toolkit.data.order import epoch_order

T = TypeVar("T")

HELD_ROWS = 256
"""Rows' worth of a stream that are read before the first of them is packed. Only the last row of a stretch stays
part empty, and its samples go into the next stretch."""


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of ``lengths`` in rows of at most ``capacity`` tokens, each position once.

    Best-fit decreasing: the longest sample first, each into the row that it fills best, a new one where it fits into
    none. Uses at most 11/9 of the fewest possible rows (Johnson, «Near-optimal bin packing algorithms», 1973); on
    ragged text, where short samples fill the gaps, next to none is left over.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0  # bit n is set where a row has room for n tokens: the smallest that fits is the lowest bit from n on
    for position in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        length = lengths[position]
        if not 0 < length <= capacity:
            raise AssertionError(f"a sample of {length} tokens for rows of {capacity}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(position)
        if left := room - length:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows


def packed_rows(lengths: Sequence[int] | NDArray[np.int64], capacity: int, seed: int, shuffle: bool) -> list[list[int]]:
    """Sample numbers by row, the same in every epoch: what is shuffled from epoch to epoch are the rows.

    So an epoch has as many steps as every other, and a resumed run finds its place without packing what came before.
    Which samples share a row is drawn from the seed; without ``shuffle`` rows are in the order of their first sample.
    """
    order = epoch_order(len(lengths), seed, 0, shuffle).tolist()
    rows = [[order[at] for at in row] for row in pack([max(1, int(lengths[i])) for i in order], capacity)]
    return rows if shuffle else sorted((sorted(row) for row in rows), key=lambda row: row[0])


def packed_stream(
    items: Iterable[T], length: Callable[[T], int], capacity: int, random: np.random.RandomState | None
) -> Iterator[list[T]]:
    """``items`` in rows, a stretch of ``HELD_ROWS`` rows' tokens at a time; the rows of a stretch in random order."""
    held: list[T] = []
    tokens = 0
    for item in items:
        held.append(item)
        tokens += max(1, length(item))
        if tokens >= HELD_ROWS * capacity:
            rows = _rows(held, length, capacity)
            held = rows.pop(min(range(len(rows)), key=lambda at: sum(max(1, length(i)) for i in rows[at])))
            tokens = sum(max(1, length(item)) for item in held)
            yield from _in_order(rows, random)
    yield from _in_order(_rows(held, length, capacity), random)


def by_length(window: Sequence[int], lengths: Sequence[int] | NDArray[np.int64]) -> list[int]:
    """A step's samples, the longest first: dealt in this order, those of like length share a micro-batch."""
    return sorted(window, key=lambda number: -int(lengths[number]))


def _rows(held: Sequence[T], length: Callable[[T], int], capacity: int) -> list[list[T]]:
    return [[held[at] for at in row] for row in pack([max(1, length(item)) for item in held], capacity)]


def _in_order(rows: Sequence[list[T]], random: np.random.RandomState | None) -> Iterator[list[T]]:
    for at in range(len(rows)) if random is None else random.permutation(len(rows)):
        yield rows[at]
