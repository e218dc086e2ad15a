"""Streamed samples as micro-batches: every rank reads the whole stream, and tokenises its own share.

A row costs little to read and much to tokenise; reading all of it lets every rank know, without a word
between them, what each window holds and how short the last one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from toolkit.data.collate import MicroBatch, Slot, collate
from toolkit.data.order import deal, shuffler
from toolkit.data.rows import Row
from toolkit.data.samples import StreamSamples
from toolkit.data.spread import Spread
from toolkit.errors import InputError

SHUFFLE_BUFFER = 10_000
"""A streamed sample trades places within so many rows; as many rows are read before the first step."""

T = TypeVar("T")
Read = tuple[int, Row, dict[str, Any]]


@dataclass(frozen=True)
class Failure:
    """An InputError on its way out of a worker process, which would bury it under a traceback."""

    problems: tuple[str, ...]


class TrainStream(IterableDataset):
    """One rank's micro-batches, epoch after epoch; a Failure, and nothing after it, at a bad row."""

    def __init__(self, samples: StreamSamples, spread: Spread, pad_to_multiple_of: int | None) -> None:
        self._samples, self._spread, self._multiple = samples, spread, pad_to_multiple_of

    def __iter__(self) -> Iterator[MicroBatch | Failure]:
        try:
            yield from self._batches()
        except InputError as error:
            yield Failure(error.problems)

    def _batches(self) -> Iterator[MicroBatch]:
        spread = self._spread
        window = epoch = 0
        per_epoch: int | None = None
        while True:
            if per_epoch is not None and window + per_epoch <= spread.start_window:
                window, epoch = window + per_epoch, epoch + 1
                continue
            first = window
            rows: Iterator[Read] = self._samples.rows()
            if spread.shuffle:
                rows = shuffled(rows, spread.seed, epoch, SHUFFLE_BUFFER)
            for held in _pieces(rows, spread.global_size):
                if window >= spread.start_window:
                    yield from _micro_batches(self._samples, held, spread, epoch, window, self._multiple)
                window += 1
            per_epoch, epoch = window - first, epoch + 1


def eval_stream(samples: StreamSamples, spread: Spread, pad_to_multiple_of: int | None) -> Iterator[MicroBatch]:
    """The stream once, in order; with ``accumulation`` 1 each window is one micro-batch."""
    for window, held in enumerate(_pieces(samples.rows(), spread.global_size)):
        yield from _micro_batches(samples, held, spread, 0, window, pad_to_multiple_of)


def shuffled(items: Iterable[T], seed: int, epoch: int, size: int) -> Iterator[T]:
    """``items``, each once, in an order that the seed and the epoch fix, with ``size`` of them held back."""
    random = shuffler(seed, epoch)
    held: list[T] = []
    for item in items:
        if len(held) < size:
            held.append(item)
            continue
        at = random.randint(size)
        yield held[at]
        held[at] = item
    for at in random.permutation(len(held)):
        yield held[at]


def _pieces(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while piece := list(islice(items, size)):
        yield piece


def _micro_batches(
    samples: StreamSamples, held: list[Read], spread: Spread, epoch: int, window: int, multiple: int | None
) -> Iterator[MicroBatch]:
    dealt = deal(held, spread.micro_size, spread.world_size)
    for micro, ranks in enumerate(dealt):
        mine = ranks[spread.rank]
        slot = Slot([number for number, _, _ in mine], epoch, window, micro, len(dealt))
        examples = [samples.build(row, fields) for _, row, fields in mine]
        yield collate(examples, slot, samples.task, samples.pad_id, multiple)
