"""Streamed samples as micro-batches: every rank reads the whole stream, and tokenises only its own samples.

Reading a row is cheap, tokenising it is expensive. Since every rank reads all rows, it knows without communication what
each window contains and how short the last one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from toolkit.data.collate import MicroBatch, Slot, collate, needs_blank, packed_slot
from toolkit.data.formats import Example
from toolkit.data.order import deal, shuffler
from toolkit.data.packing import packed_stream
from toolkit.data.rows import Row
from toolkit.data.samples import StreamSamples
from toolkit.data.spread import Spread
from toolkit.data.threads import ordered_map, thread_count
from toolkit.errors import InputError

SHUFFLE_BUFFER = 10_000
"""Size of the shuffle buffer; this many rows are read before the first step."""

T = TypeVar("T")
B = TypeVar("B")
Read = tuple[int, Row, dict[str, Any]]
Built = tuple[int, Example]


@dataclass(frozen=True)
class Failure:
    """Carries an InputError out of a worker process without a traceback."""

    problems: tuple[str, ...]


class TrainStream(IterableDataset):
    """One rank's micro-batches, epoch after epoch; a Failure, and nothing after it, at a bad row."""

    def __init__(
        self, samples: StreamSamples, spread: Spread, pad_to_multiple_of: int | None, capacity: int | None = None
    ) -> None:
        """``capacity``: tokens of a packed row; None: every sample has a row of its own."""
        self._samples, self._spread, self._multiple, self._capacity = samples, spread, pad_to_multiple_of, capacity

    def __iter__(self) -> Iterator[MicroBatch | Failure]:
        try:
            yield from self._batches()
        except InputError as error:
            yield Failure(error.problems)

    def _batches(self) -> Iterator[MicroBatch]:
        spread = self._spread
        window = epoch = 0
        per_epoch: int | None = None
        # Rows of another order pack otherwise: only the same order shows how many steps an epoch has.
        countable = self._capacity is None or not spread.shuffle
        micro_batches: Any = _micro_batches if self._capacity is None else _packed_batches
        while True:
            if countable and per_epoch is not None and window + per_epoch <= spread.start_window:
                window, epoch = window + per_epoch, epoch + 1
                continue
            first = window
            held: Any
            if self._capacity is None:
                pieces: Any = stream_windows(self._samples.rows(), spread, epoch)
            else:
                # Loader workers are parallel processes already.
                threads = 1 if get_worker_info() or not self._samples.threaded else thread_count(alone=False)
                pieces = packed_windows(
                    self._samples.rows(), self._build, _length, self._capacity, spread, epoch, threads
                )
            for held in pieces:
                if window >= spread.start_window:
                    yield from micro_batches(self._samples, held, spread, epoch, window, self._multiple)
                window += 1
            per_epoch, epoch = window - first, epoch + 1

    def _build(self, read: Read) -> Built:
        number, row, fields = read
        return number, self._samples.build(row, fields)


def stream_windows(rows: Iterable[T], spread: Spread, epoch: int) -> Iterator[list[T]]:
    """The windows of an epoch of a stream, in order."""
    if spread.shuffle:
        rows = shuffled(rows, spread.seed, epoch, SHUFFLE_BUFFER)
    return _pieces(iter(rows), spread.global_size)


def packed_windows(
    rows: Iterable[T],
    build: Callable[[T], B],
    length: Callable[[B], int],
    capacity: int,
    spread: Spread,
    epoch: int,
    threads: int = 1,
) -> Iterator[list[list[B]]]:
    """``stream_windows`` of packed rows. Every rank builds every sample: what shares a row follows from all their
    lengths."""
    if spread.shuffle:
        rows = shuffled(rows, spread.seed, epoch, SHUFFLE_BUFFER)
    random = shuffler(spread.seed, epoch) if spread.shuffle else None
    built = ordered_map(build, rows, threads)
    return _pieces(packed_stream(built, length, capacity, random), spread.global_size)


def _length(built: Built) -> int:
    return len(built[1].input_ids)


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
    dealt = deal(held, spread.micro_size, spread.data_size)
    for micro, ranks in enumerate(dealt):
        mine = ranks[spread.data_rank]
        slot = Slot([number for number, _, _ in mine], epoch, window, micro, len(dealt))
        examples = [samples.build(row, fields) for _, row, fields in mine]
        blank = samples.blank if needs_blank(examples, samples.task) else None
        yield collate(examples, slot, samples.task, samples.pad_id, multiple, samples.masking, blank)


def _packed_batches(
    samples: StreamSamples, held: list[list[Built]], spread: Spread, epoch: int, window: int, multiple: int | None
) -> Iterator[MicroBatch]:
    dealt = deal(held, spread.micro_size, spread.data_size)
    for micro, ranks in enumerate(dealt):
        mine = ranks[spread.data_rank]
        numbers = [[number for number, _ in row] for row in mine]
        slot = packed_slot(numbers, epoch, window, micro, len(dealt), spread.one_row)
        examples = [example for row in mine for _, example in row]
        blank = samples.blank if needs_blank(examples, samples.task) else None
        yield collate(examples, slot, samples.task, samples.pad_id, multiple, samples.masking, blank)
