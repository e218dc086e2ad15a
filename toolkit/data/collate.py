"""Collate samples into tensors: one micro-batch as the model's forward expects it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from toolkit.data.formats import Example, filler, row_without_loss, supervised_tokens
from toolkit.data.masking import Masking
from toolkit.data.media import TOKEN_KINDS
from toolkit.recipe.mesh import RowPart
from toolkit.tasks import task_of
from toolkit.tasks.base import Features, Task
from toolkit.tasks.labels import IGNORED, Labels


@dataclass(frozen=True)
class Bounds:
    """Where packed samples begin, in the rows of a micro-batch joined to one.

    ``starts``: int32 (samples + 1,), 0 first, the number of tokens last; the padding of a row is one more sample.
    ``longest``: tokens of the longest sample.
    """

    starts: torch.Tensor
    longest: int


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward pass.

    ``tensors``: keyword arguments of the model's forward, all int64: ``input_ids`` and
    ``attention_mask`` (batch, length), ``labels`` (batch, length) unshifted with IGNORED where there
    is no loss, or (batch,) for tasks with one label per sample. Packed rows have ``position_ids`` (batch, length),
    0 where a sample begins, instead of the mask. Models of images or sound have float32 features beside them or in
    their place. ``entries``: of features whose first axis does not count samples, how many belong to each row.
    ``sample_ids``: which samples, empty for a
    dummy that only keeps this rank in step with the others. ``supervised``: predictions with loss.
    ``window``: the optimizer step, from 0 over the whole run; ``micro`` of ``micro_count`` within it.
    """

    tensors: dict[str, torch.Tensor]
    sample_ids: list[int]
    supervised: int
    epoch: int
    window: int
    micro: int
    micro_count: int
    entries: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    part: RowPart | None = None
    """Which tokens of the rows this rank computes, where others compute the rest: then ``supervised`` counts the
    predictions at these alone. ``tensors`` have the whole rows."""
    bounds: Bounds | None = None
    """Of packed rows."""
    row_tokens: int = 0
    """Input tokens of its samples, padding aside; where the model takes no tokens, the labels that have a loss. Where
    several ranks share the rows, the first of them counts them."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """A copy on ``device``; the copy from pinned memory is asynchronous."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """A copy in page-locked memory. torch's DataLoader calls this by its name."""
        return self._moved(torch.Tensor.pin_memory)

    def every_tensor(self) -> list[torch.Tensor]:
        """All tensors that ``to`` copies."""
        return [*self.tensors.values(), *([] if self.bounds is None else [self.bounds.starts])]

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        bounds = None if self.bounds is None else replace(self.bounds, starts=move(self.bounds.starts))
        return replace(self, tensors={name: move(tensor) for name, tensor in self.tensors.items()}, bounds=bounds)


def divided(micro: MicroBatch, part: RowPart | None) -> MicroBatch:
    """The share of ``micro``, of a causal model, that one rank computes. Rows are a multiple of ``part.count`` long."""
    if part is None:
        return micro
    # The prediction at position t is of token t + 1, which may be the next part's first.
    own = part.tokens(micro.tensors["labels"].shape[1])
    targets = micro.tensors["labels"][:, own.start + 1 : own.stop + 1]
    supervised = int((targets != IGNORED).sum()) if micro.supervised else 0
    return replace(micro, part=part, supervised=supervised, row_tokens=0 if part.index else micro.row_tokens)


@dataclass(frozen=True)
class Slot:
    """One rank's part of one micro-batch: its sample numbers, and its position in the run."""

    sample_ids: list[int]
    epoch: int
    window: int
    micro: int
    micro_count: int
    rows: tuple[int, ...] | None = None
    """Packed: number of consecutive samples in each row. None: one sample per row."""


def packed_slot(rows: Sequence[list[int]], epoch: int, window: int, micro: int, count: int, one_row: bool) -> Slot:
    """The slot of ``rows`` of sample numbers; in ``one_row`` they follow one another."""
    sizes = [len(row) for row in rows]
    ids = [number for row in rows for number in row]
    return Slot(ids, epoch, window, micro, count, ((sum(sizes),) if sizes else ()) if one_row else tuple(sizes))


def padded_shape(lengths: Sequence[int], rows: Sequence[int] | None, multiple: int = 1) -> tuple[int, int]:
    """Rows, and tokens of each, that ``collate`` makes of samples of these lengths; ``rows`` as in ``Slot``.

    A row that encodes to nothing attends to one token: a softmax over nothing is NaN. No samples are one row of two.
    """
    tokens = [max(1, length) for length in lengths]
    if rows is not None:
        remaining = iter(tokens)
        tokens = [sum(islice(remaining, count)) for count in rows]
    tokens = tokens or [2]
    return len(tokens), -(-max(tokens) // multiple) * multiple


def collate(
    examples: Sequence[Example],
    slot: Slot,
    task: str,
    pad_id: int,
    pad_to_multiple_of: int | None = None,
    masking: Masking | None = None,
    blank: Example | None = None,
) -> MicroBatch:
    """Pad ``examples`` on the right to the longest of them (and up to ``pad_to_multiple_of``), with tokens hidden as
    ``masking`` says.

    A micro-batch without a single image has ``blank`` as one more row, where the task's samples may have images: every
    rank runs the same modules, in the same collectives, for each of them.

    Without examples: ``blank``, or one row of two tokens without loss, so that the rank can join the collectives of
    the others' forward and backward.
    """
    if len(examples) != len(slot.sample_ids):
        raise AssertionError(f"{len(examples)} examples for the samples {slot.sample_ids}")
    if masking is not None:
        pairs = zip(examples, slot.sample_ids, strict=True)
        examples = [masking.hide(example, slot.epoch, number) for example, number in pairs]
    supervised = sum(supervised_tokens(example, task) for example in examples)
    media = task_of(task).media
    takes_tokens = media is None or media.tokens
    row_tokens = sum(len(example.input_ids) for example in examples) if takes_tokens else supervised
    multiple = pad_to_multiple_of or 1
    _, length = padded_shape([len(example.input_ids) for example in examples], slot.rows, multiple)
    if slot.rows is not None:
        tensors, bounds = _packed(examples, slot.rows, pad_id, length)
        return replace(_micro_batch(tensors, slot, supervised), bounds=bounds, row_tokens=row_tokens)
    rows = list(examples) or [blank or row_without_loss(task, pad_id)]
    if examples and blank is not None and needs_blank(examples, task):
        rows.append(blank)
    tensors = {}
    if takes_tokens:
        ids = [row.input_ids or [filler(pad_id)] for row in rows]
        length = max(length, *(len(row) for row in ids))
        tensors = {
            "input_ids": _padded(ids, length, pad_id),
            "attention_mask": _padded([np.ones(len(row), np.int64) for row in ids], length, 0),
        }
    features, entries = _joined([row.features for row in rows])
    tensors |= {
        name: functional.pad(tensor, (0, length - tensor.shape[1])) if name in TOKEN_KINDS else tensor
        for name, tensor in features.items()
    }
    layout = task_of(task).labels
    if layout is Labels.SAMPLE:
        tensors["labels"] = torch.tensor([row.labels for row in rows], dtype=torch.int64)
    else:
        labels = [[] if isinstance(row.labels, int) else row.labels for row in rows]
        width = length if layout.under_input else padded_shape([len(row) for row in labels], None, multiple)[1]
        tensors["labels"] = _padded(labels, width, IGNORED)
    return replace(_micro_batch(tensors, slot, supervised), entries=entries, row_tokens=row_tokens)


def needs_blank(examples: Sequence[Example], task: str) -> bool:
    """Whether a micro-batch of these needs a row that is no sample of it."""
    media = task_of(task).media
    if media is None or not examples:
        return not examples
    return media.tokens and not any(media.main in one.features for one in examples)


def _joined(rows: Sequence[Features]) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """Features of all rows one after another along the first axis, zeros behind whatever is shorter along another
    (images of fewer tiles, whose number the model is given); and how many of each row there are, where not one."""
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        arrays = [row[name] for row in rows if name in row]
        shape = tuple(max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True))
        pieces = [functional.pad(torch.from_numpy(array), _behind(array.shape[1:], shape)) for array in arrays]
        tensors[name] = torch.cat(pieces)
        counts = tuple(len(row[name]) if name in row else 0 for row in rows)
        if counts != (1,) * len(rows):
            entries[name] = counts
    return tensors, entries


def _behind(shape: tuple[int, ...], wanted: tuple[int, ...]) -> list[int]:
    """Padding at the end of each axis, the last axis first, as torch takes it."""
    return [amount for size, most in reversed(list(zip(shape, wanted, strict=True))) for amount in (0, most - size)]


def _micro_batch(tensors: dict[str, torch.Tensor], slot: Slot, supervised: int) -> MicroBatch:
    return MicroBatch(tensors, slot.sample_ids, supervised, slot.epoch, slot.window, slot.micro, slot.micro_count)


def bounds_of(tensors: Mapping[str, torch.Tensor]) -> Bounds | None:
    """Of packed rows, by their ``position_ids`` alone: padding tokens are samples of one. Waits for the device that
    they are on. None for rows that are not packed."""
    positions = tensors.get("position_ids")
    if positions is None:
        return None
    flat = positions.flatten().cpu().numpy()
    found = _bounds([*np.flatnonzero(flat == 0).tolist(), flat.size])
    return replace(found, starts=found.starts.to(positions.device))


def _bounds(starts: Sequence[int]) -> Bounds:
    found = np.asarray(starts, np.int32)
    return Bounds(torch.from_numpy(found), int(np.diff(found).max()))


def _packed(
    examples: Sequence[Example], rows: Sequence[int], pad_id: int, length: int
) -> tuple[dict[str, torch.Tensor], Bounds]:
    """Samples of a causal model one after another in each row.

    Without an attention mask, transformers takes each return of the positions for a new sequence, and lets none attend
    to another (``find_packed_sequence_indices``; flash attention by cumulative lengths). A sample's first token is
    never predicted: the token before it is another sample's. Each padding token is a sequence of its own; in the
    bounds, which no loss at padding depends on, those of a row are one.
    """
    shape = max(1, len(rows)), length
    ids, positions, labels = (np.full(shape, value, np.int64) for value in (pad_id, 0, IGNORED))
    remaining = iter(examples)
    starts: list[int] = []
    for row, count in enumerate(rows):
        end = 0
        for example in islice(remaining, count):
            assert not isinstance(example.labels, int)
            tokens = example.input_ids or [filler(pad_id)]
            start, end = end, end + len(tokens)
            starts.append(row * length + start)
            ids[row, start:end] = tokens
            positions[row, start:end] = np.arange(len(tokens))
            if len(tokens) > 1:
                labels[row, start + 1 : end] = example.labels[1:]
        starts += [row * length + end] if end < length else []
    if not rows:
        ids[0, :2] = filler(pad_id)
        positions[0, :2] = 0, 1
        starts = [0, 2] if length > 2 else [0]
    tensors = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in tensors.items()}, _bounds([*starts, ids.size])


def _padded(rows: Sequence[Sequence[int] | NDArray[np.int64]], length: int, value: int) -> torch.Tensor:
    found = np.full((len(rows), length), value, np.int64)
    for at, row in enumerate(rows):
        found[at, : len(row)] = row
    return torch.from_numpy(found)


def drawn_features(task: Task, config: Mapping[str, Any], rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Random features of ``rows`` samples, of the shapes that a model of this ``config`` takes; {} for tokens alone."""
    if task.media is None:
        return {}
    draw = random.Random(seed)
    return _joined([task.media.draw(config, draw) for _ in range(rows)])[0]


def sample_spans(position_ids: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Start and end of each sample in packed rows, by row, including padding tokens."""
    found = []
    for row in position_ids.tolist():
        starts = [at for at, position in enumerate(row) if position == 0]
        found.append(list(zip(starts, [*starts[1:], len(row)], strict=True)))
    return found
