"""The same window computed in other correct ways: other orders, rows apart, everything in one batch, random groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from toolkit.data.collate import MicroBatch, sample_spans
from toolkit.data.media import TOKEN_KINDS
from toolkit.reference.loop import Window
from toolkit.tasks.labels import IGNORED

Grouped = list[tuple[MicroBatch, list[int]]]
"""Micro-batches, each with the places in the window of those whose loss it holds."""


PACKED = ("input_ids", "position_ids", "labels")


def is_packed(micro: MicroBatch) -> bool:
    """Whether rows may hold several samples, distinguished by their positions."""
    return "position_ids" in micro.tensors


def _samples(micro: MicroBatch) -> list[MicroBatch]:
    found = []
    for row, spans in enumerate(sample_spans(micro.tensors["position_ids"])):
        for start, end in spans:
            one = {name: micro.tensors[name][row : row + 1, start:end] for name in PACKED}
            supervised = int((one["labels"][:, 1:] != IGNORED).sum())
            if supervised or not micro.supervised:
                # A mask in place of the positions: no code that distinguishes packed samples has a part in it.
                del one["position_ids"]
                one["attention_mask"] = torch.ones_like(one["input_ids"])
                found.append(replace(micro, tensors=one, supervised=supervised))
    return found


def reversed_order(window: Window) -> Grouped:
    """Micro-batches and ranks summed the other way round."""
    return [(micro, [at]) for at, (_, micro) in reversed(list(enumerate(window)))]


def rows_apart(window: Window) -> Grouped:
    """Every row a micro-batch of its own, without padding; every sample, where rows hold several."""
    found: Grouped = []
    for at, (_, micro) in enumerate(window):
        rows = _samples(micro) if is_packed(micro) else _rows(micro)
        found += [(row, [at]) for row in rows]
    return found


def drawn(window: Window, draw: random.Random, *, across: bool) -> Grouped:
    """Rows in a random order and in random groups of 1 to 4, each a micro-batch. ``across``: groups may have rows of
    several micro-batches. What one row holds stays together."""
    rows = [(row, at) for at, (_, micro) in enumerate(window) for row in _rows(micro)]
    draw.shuffle(rows)
    found: Grouped = []
    while rows:
        (first, at), size = rows[0], draw.randint(1, 4)
        group: list[tuple[MicroBatch, int]] = []
        rest: list[tuple[MicroBatch, int]] = []
        for row, place in rows:
            fits = (across or place == at) and len(group) < size
            if is_packed(first):  # padding would be one more sample
                fits = fits and row.tensors["input_ids"].shape == first.tensors["input_ids"].shape
            (group if fits else rest).append((row, place))
        rows = rest
        micros = [row for row, _ in group]
        found.append((_together(micros), sorted({at for _, at in group})))
    return found


def shuffled(window: Window, draw: random.Random) -> Grouped:
    """Micro-batches in a random order, and the rows of each: for losses that depend on what a micro-batch holds."""
    found: Grouped = []
    for at in draw.sample(range(len(window)), len(window)):
        _, micro = window[at]
        order = draw.sample(range(len(micro.tensors["labels"])), len(micro.tensors["labels"]))
        mixed = _together([_row(micro, row) for row in order])
        found.append((replace(mixed, supervised=micro.supervised), [at]))
    return found


def _rows(micro: MicroBatch) -> list[MicroBatch]:
    """Each row, without its padding."""
    found = []
    for row in range(len(micro.tensors["labels"])):
        one = _row(micro, row).tensors
        if "attention_mask" in one:
            length = max(1, int(one["attention_mask"].sum()))
            one = {name: t[:, :length] if _beside_inputs(name, t, one) else t for name, t in one.items()}
        labels = one["labels"]
        shifted = labels[:, 1:] if "input_ids" in one and labels.shape == one["input_ids"].shape else labels
        supervised = int((shifted != IGNORED).sum()) if micro.supervised else 0
        entries = {name: (counts[row],) for name, counts in micro.entries.items()}
        found.append(replace(micro, tensors=one, supervised=supervised, entries=entries))
    return found


def _row(micro: MicroBatch, row: int) -> MicroBatch:
    """A row as it is, padding included."""
    found = {}
    for name, tensor in micro.tensors.items():
        counts = micro.entries.get(name)
        first = row if counts is None else sum(counts[:row])
        if counts is None or counts[row]:  # a row without images has no features of them
            found[name] = tensor[first : first + (1 if counts is None else counts[row])]
    entries = {name: (counts[row],) for name, counts in micro.entries.items()}
    return replace(micro, tensors=found, entries=entries)


def _together(micros: Sequence[MicroBatch]) -> MicroBatch:
    """The rows of all as one micro-batch."""
    first = micros[0]
    tensors = {
        name: _stacked([micro.tensors[name] for micro in micros if name in micro.tensors], _filler(name))
        for name in dict.fromkeys(name for micro in micros for name in micro.tensors)
    }
    entries = {
        name: tuple(count for micro in micros for count in _counts(micro, name))
        for name in dict.fromkeys(name for micro in micros for name in micro.entries)
    }
    return replace(first, tensors=tensors, supervised=sum(micro.supervised for micro in micros), entries=entries)


def _counts(micro: MicroBatch, name: str) -> tuple[int, ...]:
    """Entries of a feature by row."""
    return tuple(micro.entries.get(name, (int(name in micro.tensors),) * len(micro.tensors["labels"])))


def all_together(window: Window) -> Grouped:
    """The whole window as one batch."""
    micros = [micro for _, micro in window]
    if is_packed(micros[0]):  # one long row: flash attention takes packed samples in no other way
        flat = {name: torch.cat([micro.tensors[name].reshape(1, -1) for micro in micros], 1) for name in PACKED}
        whole = replace(micros[0], tensors=flat, supervised=sum(micro.supervised for micro in micros))
        return [(whole, list(range(len(micros))))]
    return [(_together(micros), list(range(len(micros))))]


def _filler(name: str) -> int:
    return IGNORED if name == "labels" else 0


def _beside_inputs(name: str, tensor: torch.Tensor, one: dict[str, torch.Tensor]) -> bool:
    return name in ("input_ids", "attention_mask", *TOKEN_KINDS) or (
        name == "labels" and tensor.ndim == 2 and tensor.shape == one["input_ids"].shape
    )


def _stacked(tensors: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    most = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    padding = [[n for size, top in zip(reversed(t.shape[1:]), reversed(most), strict=True) for n in (0, top - size)]
               for t in tensors]  # fmt: skip
    return torch.cat([functional.pad(t, pad, value=fill) for t, pad in zip(tensors, padding, strict=True)])
