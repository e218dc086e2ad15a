"""Micro-batches in the order of the run, by rank: endless for training, one pass for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from toolkit.data.collate import MicroBatch, Slot, collate, divided, needs_blank, packed_slot
from toolkit.data.opening import open_data
from toolkit.data.order import deal, epoch_order, window_count, windows
from toolkit.data.packing import by_length, packed_rows
from toolkit.data.samples import MapSamples, MixedSamples, Samples, StreamSamples
from toolkit.data.spread import Spread, takes_one_row
from toolkit.data.stream import Failure, TrainStream, eval_stream
from toolkit.errors import InputError
from toolkit.recipe.mesh import RowPart
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe

__all__ = ["TrainLoader", "eval_batches", "open_data"]


class TrainLoader:
    """Windows of micro-batches for one data-parallel rank, epoch after epoch, without end.

    Iterating yields one ``list[MicroBatch]`` per optimizer step, from ``start_window`` on; every rank
    gets as many micro-batches per window as the others. What it yields depends on the data, the seed,
    the window, the micro-batch and the rank alone: never on the workers, nor on where a run began.

    ``steps_per_epoch``: windows per epoch; None when streamed, where only reading shows it.
    """

    def __init__(
        self,
        samples: Samples,
        recipe: Recipe,
        *,
        micro_size: int,
        accumulation: int,
        data_size: int,
        data_rank: int,
        device_type: str,
        start_window: int = 0,
        pad_to_multiple_of: int | None = None,
        part: RowPart | None = None,
    ) -> None:
        """``part``: which tokens of every row this process computes; rows are padded to a multiple of the parts."""
        pad_to_multiple_of = pad_to_multiple_of if part is None else part.count
        self._part, self._samples = part, samples
        self.start_window = start_window
        self.steps_per_epoch: int | None = None
        self._pin = device_type == "cuda"
        # A stream is read in one order; a second worker would only read all of it again.
        self._workers = min(1, recipe.data.workers) if samples.streamed else recipe.data.workers
        self._ahead = max(2, -(-accumulation // max(1, self._workers)) + 1)
        spread = Spread(
            micro_size,
            accumulation,
            data_size,
            data_rank,
            recipe.run.seed,
            recipe.data.shuffle,
            start_window,
            one_row=takes_one_row(recipe.model.attention),
        )
        self._slots: MapSlots | None = None
        self._data: Any
        if isinstance(samples, StreamSamples):
            capacity = recipe.data.max_length if recipe.data.packing else None
            self._data = TrainStream(samples, spread, pad_to_multiple_of, capacity)
        else:
            self._data = _Collated(samples, pad_to_multiple_of)
            self._slots = slots = MapSlots(samples.lengths(), recipe, spread)
            self.steps_per_epoch = slots.steps_per_epoch

    @classmethod
    def of(cls, resolved: Resolved, samples: Samples, rank: int, start_window: int = 0) -> TrainLoader:
        """The loader of process ``rank`` of a run of ``resolved``, on its device."""
        return cls(
            samples,
            resolved.recipe,
            micro_size=resolved.micro_size,
            accumulation=resolved.accumulation,
            data_size=resolved.data_size,
            data_rank=resolved.data_rank(rank),
            device_type=resolved.device,
            start_window=start_window,
            part=resolved.row_part(rank),
        )

    def longest(self) -> MicroBatch:
        """The micro-batch that takes most memory, on every rank: the longest samples, or the fullest packed rows, as
        many as a micro-batch has. Of a stream, the longest of its first window."""
        samples = self._samples
        if self._slots is None or isinstance(samples, StreamSamples):
            first = max(next(iter(self)), key=lambda micro: max(one.numel() for one in micro.tensors.values()))
            return replace(first, micro=0, micro_count=1)  # ranks may choose others: each is alone in its window
        lengths, targets = samples.lengths(), samples.target_lengths()
        slot = self._slots.longest(lengths if targets is None else lengths + targets)
        return divided(self._data.collated(slot), self._part)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        loader = DataLoader(
            self._data,
            batch_size=None,  # a slot already is a micro-batch
            sampler=self._slots,
            num_workers=self._workers,
            prefetch_factor=self._ahead if self._workers else None,
            pin_memory=self._pin,
            # DataLoader draws a seed; from the global generator, that would shift the dropout masks.
            generator=torch.Generator().manual_seed(0),
        )
        window: list[MicroBatch] = []
        for batch in loader:
            if isinstance(batch, Failure):
                raise InputError(*batch.problems)
            window.append(divided(batch, self._part))
            if len(window) == batch.micro_count:
                yield window
                window = []


def eval_batches(
    samples: Samples,
    recipe: Recipe,
    micro_size: int,
    data_size: int,
    data_rank: int,
    device_type: str,
    pad_to_multiple_of: int | None = None,
    part: RowPart | None = None,
) -> Iterator[MicroBatch]:
    """A data-parallel rank's micro-batches of every sample once, in order, as many on every rank.

    ``window`` counts them; each is alone (``micro`` 0 of 1). ``part``: as of ``TrainLoader``.
    """
    pad_to_multiple_of = pad_to_multiple_of if part is None else part.count
    spread = Spread(micro_size, 1, data_size, data_rank, recipe.run.seed, shuffle=False)
    if isinstance(samples, StreamSamples):
        batches = eval_stream(samples, spread, pad_to_multiple_of)
    else:
        data = _Collated(samples, pad_to_multiple_of)
        batches = (data.collated(slot) for slot in _epoch_slots(range(len(samples)), spread))
    for batch in batches:
        batch = divided(batch, part)
        yield batch.pin_memory() if device_type == "cuda" else batch


class _Collated(Dataset[MicroBatch | Failure]):
    """Samples by slot: a worker looks up samples and pads them. An error leaves the worker as a value: as an exception
    it would be a traceback."""

    def __init__(self, samples: MapSamples | MixedSamples, pad_to_multiple_of: int | None) -> None:
        self._samples, self._multiple = samples, pad_to_multiple_of

    def __getitem__(self, slot: Slot) -> MicroBatch | Failure:
        try:
            return self.collated(slot)
        except InputError as error:
            return Failure(error.problems)

    def collated(self, slot: Slot) -> MicroBatch:
        """The micro-batch of ``slot``; raises InputError if an image or a recording can no longer be read."""
        samples = self._samples
        examples = [samples[index] for index in slot.sample_ids]
        blank = samples.blank if needs_blank(examples, samples.task) else None
        return collate(examples, slot, samples.task, samples.pad_id, self._multiple, samples.masking, blank)


class MapSlots(Sampler[Slot]):
    """The slots of one rank, window after window, without end; skipping reads no data.

    ``rows``: the samples of each packed row; None: every sample has a row of its own.
    """

    def __init__(self, lengths: NDArray[np.int64], recipe: Recipe, spread: Spread) -> None:
        """``lengths``: tokens of each sample, shape (samples,)."""
        data = recipe.data
        self.rows: list[list[int]] | None = None
        if data.packing:
            self.rows = packed_rows(lengths, data.max_length, recipe.run.seed, data.shuffle)
        self._lengths = lengths if data.group_by_length and not data.packing else None
        self._n = len(lengths) if self.rows is None else len(self.rows)
        self._spread = spread
        self.steps_per_epoch = window_count(self._n, spread.global_size)

    def __iter__(self) -> Iterator[Slot]:
        spread = self._spread
        epoch, skip = divmod(spread.start_window, self.steps_per_epoch)
        window = spread.start_window
        while True:
            for dealt in self.windows(epoch, skip):
                for micro, ranks in enumerate(dealt):
                    yield self.slot(ranks[spread.data_rank], epoch, window, micro, len(dealt))
                window += 1
            epoch, skip = epoch + 1, 0

    def windows(self, epoch: int, skip: int = 0) -> Iterator[list[list[list[int]]]]:
        """The windows of ``epoch`` as ``deal`` gives them (samples, or packed rows), after the first ``skip``."""
        spread = self._spread
        order = epoch_order(self._n, spread.seed, epoch, spread.shuffle)[skip * spread.global_size :]
        for ids in windows(order, spread.global_size):
            ids = ids if self._lengths is None else by_length(ids, self._lengths)
            yield deal(ids, spread.micro_size, spread.data_size)

    def longest(self, lengths: NDArray[np.int64]) -> Slot:
        """What one rank computes at once, of the longest samples or the fullest packed rows. ``lengths``: of samples,
        with what a decoder writes for them."""
        sizes = lengths if self.rows is None else [int(lengths[row].sum()) for row in self.rows]
        order = np.argsort(-np.asarray(sizes), kind="stable")[: self._spread.micro_size]
        return self.slot(order.tolist(), epoch=0, window=0, micro=0, count=1)

    def slot(self, mine: list[int], epoch: int, window: int, micro: int, count: int) -> Slot:
        """What one rank of ``windows`` computes at once."""
        if self.rows is None:
            return Slot(mine, epoch, window, micro, count)
        held = [self.rows[row] for row in mine]
        return packed_slot(held, epoch, window, micro, count, self._spread.one_row)


def _epoch_slots(order: range, spread: Spread) -> Iterator[Slot]:
    for window, ids in enumerate(windows(order, spread.global_size)):
        [ranks] = deal(ids, spread.micro_size, spread.data_size)
        yield Slot(ranks[spread.data_rank], 0, window, 0, 1)
