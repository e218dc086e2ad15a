"""The samples that reach furthest: with the largest id, the most tokens, or an end that none should have.

Each is found in the flat arrays of a source, without a loop over its samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from toolkit.data.columns import Columns
from toolkit.data.samples import MapSamples, MixedSamples

Extreme = tuple[MapSamples, int, int]
"""The source that has it, the number of the sample there, and the value."""


def extreme(samples: MapSamples | MixedSamples, find: Callable[[Columns], tuple[int, int]]) -> Extreme:
    """The largest that ``find`` gives of a source: the number of a sample, and its value."""
    parts = [samples] if isinstance(samples, MapSamples) else samples.parts
    return max(((part, *find(part.columns)) for part in parts), key=lambda one: one[2])


def _largest(values: Any, ends: Any) -> tuple[int, int]:
    values = np.asarray(values)
    if not values.size:
        return 0, -1
    place = int(values.argmax())
    return int(np.searchsorted(np.asarray(ends), place, side="right")) - 1, int(values[place])


def largest_id(columns: Columns) -> tuple[int, int]:
    return _largest(columns.ids, columns.id_ends)


def largest_label(columns: Columns) -> tuple[int, int]:
    return _largest(columns.labels, columns.label_ends)


def longest(columns: Columns) -> tuple[int, int]:
    lengths = columns.lengths()
    return int(lengths.argmax()), int(lengths.max())


def longest_target(columns: Columns) -> tuple[int, int]:
    lengths = np.diff(np.asarray(columns.label_ends))
    return int(lengths.argmax()), int(lengths.max())


def has_most(token: int, *, fewest: bool = False) -> Callable[[Columns], tuple[int, int]]:
    """The sample with the most of ``token``, and how many; with ``fewest``, that with the fewest and the number less
    than zero."""

    def find(columns: Columns) -> tuple[int, int]:
        ends = np.asarray(columns.id_ends)
        until = np.concatenate([[0], np.cumsum(np.asarray(columns.ids) == token)])
        counts = np.diff(until[ends]) * (-1 if fewest else 1)
        return int(counts.argmax()), int(counts.max())

    return find


def ends_in(token: int) -> Callable[[Columns], tuple[int, int]]:
    """The first sample that ends with ``token``, with 1; 0 where none does."""

    def find(columns: Columns) -> tuple[int, int]:
        ends, ids = np.asarray(columns.id_ends), np.asarray(columns.ids)
        ending = (ends[1:] > ends[:-1]) & (ids[np.maximum(ends[1:], 1) - 1] == token) if ids.size else ends[1:] < 0
        return int(ending.argmax()), int(ending.any())

    return find
