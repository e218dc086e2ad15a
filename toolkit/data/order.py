"""The order of samples and their assignment to ranks: arithmetic on sample numbers only.

The order of an epoch depends only on the seed. A window (one optimizer step) is its next ``global_size`` samples; only
then is a window distributed to ranks. So the number of ranks determines who computes a sample, but never which samples
share a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """The ``n`` sample numbers in the order of ``epoch`` (from 0): int64, shape (n,), each exactly once.

    ``shuffle=False`` is 0, 1, ... in every epoch.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    return shuffler(seed, epoch).permutation(n).astype(np.int64)


def shuffler(seed: int, epoch: int) -> np.random.RandomState:
    """The random numbers that order one epoch.

    RandomState's stream is frozen for good, that of numpy's newer Generator may change with a release
    (NEP 19), and a run may be resumed under another numpy.
    """
    return np.random.RandomState([seed, epoch])


def windows(order: Sequence[int] | NDArray[np.int64], global_size: int) -> Iterator[list[int]]:
    """``order`` in pieces of ``global_size``; the last one may be shorter."""
    for start in range(0, len(order), global_size):
        piece = order[start : start + global_size]
        yield piece.tolist() if isinstance(piece, np.ndarray) else list(piece)


def window_count(n: int, global_size: int) -> int:
    """Optimizer steps per epoch."""
    return -(-n // global_size)


def deal(window: Sequence[T], micro_size: int, data_size: int) -> list[list[list[T]]]:
    """A window as ``[micro-batch][data-parallel rank] -> samples``.

    Micro-batch ``m`` on rank ``r`` is ``window[(m * data_size + r) * micro_size :][:micro_size]``. A
    short window has fewer micro-batches, as many on every rank; in its last one some ranks may have
    fewer samples, or none.
    """
    row = micro_size * data_size
    return [
        [list(window[at : at + micro_size]) for at in range(start, start + row, micro_size)]
        for start in range(0, len(window), row)
    ]
