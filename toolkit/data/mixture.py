"""How much of each source an epoch has, and which samples: pure arithmetic, fixed by the sizes and the seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
_STREAM = 0x6D6978
"""Keeps the draws of a mixture apart from those of an epoch's order, which are seeded with two numbers."""


def epoch_counts(
    sizes: Sequence[int], weights: Sequence[float | None], proportions: Sequence[float | None]
) -> list[int]:
    """Samples of each source in an epoch.

    By weights: ``weight * size``, rounded to the nearest (default weight 1). By proportions: as many as fit before the
    first source is used up, the total dealt by largest remainder, so that no share is off by a whole sample.
    """
    if all(share is None for share in proportions):
        return [math.floor((1 if weight is None else weight) * size + 0.5)
                for size, weight in zip(sizes, weights, strict=True)]  # fmt: skip
    shares = [share or 0.0 for share in proportions]
    # 30 samples of a share of 0.3 are 100, not 99: the quotient is off by less than this.
    total = min(math.floor(size / share + 1e-9) for size, share in zip(sizes, shares, strict=True))
    exact = [share * total for share in shares]
    counts = [math.floor(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: (counts[at] - exact[at], at))
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


def chosen(sizes: Sequence[int], counts: Sequence[int], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(source, sample within it) of every sample of an epoch, both of shape (sum of ``counts``,).

    A source that occurs ``n`` times and a part: each of its samples ``n`` times, and a part of them once more, drawn
    without replacement. In this order, which counts where data is not shuffled, sources are spread evenly.
    """
    parts, indices, places = [], [], []
    for part, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        full, rest = divmod(count, size)
        some = np.sort(np.random.RandomState([seed, _STREAM, part]).permutation(size)[:rest])
        index = np.concatenate([np.tile(np.arange(size, dtype=np.int64), full), some.astype(np.int64)])
        parts.append(np.full(count, part, dtype=np.int64))
        indices.append(index)
        places.append((np.arange(count) + 0.5) / max(1, count))
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(parts)[order], np.concatenate(indices)[order]


def interleaved(sources: Sequence[Callable[[], Iterator[T]]], shares: Sequence[float]) -> Iterator[tuple[int, T]]:
    """(source, item) of streams, each next from the source that is furthest behind its share; ends with the first that
    ends, so that shares hold to the end."""
    streams = [open_stream() for open_stream in sources]
    if len(streams) == 1:
        yield from ((0, item) for item in streams[0])
        return
    taken = [0] * len(streams)
    while True:
        total = sum(taken) + 1
        part = max(range(len(streams)), key=lambda at: (shares[at] * total - taken[at], -at))
        try:
            item = next(streams[part])
        except StopIteration:
            return
        taken[part] += 1
        yield part, item
