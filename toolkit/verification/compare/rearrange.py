"""The same window computed in other correct ways: other orders, rows apart, everything in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from toolkit.data.collate import MicroBatch, sample_spans
from toolkit.data.formats import IGNORED
from toolkit.reference.loop import Window

Grouped = list[tuple[MicroBatch, list[int]]]
"""Micro-batches, each with the places in the window of those whose loss it holds."""


PACKED = ("input_ids", "position_ids", "labels")


def is_packed(micro: MicroBatch) -> bool:
    """Whether rows may hold several samples, told apart by their positions."""
    return "attention_mask" not in micro.tensors


def _samples(micro: MicroBatch) -> list[MicroBatch]:
    found = []
    for row, spans in enumerate(sample_spans(micro.tensors["position_ids"])):
        for start, end in spans:
            one = {name: micro.tensors[name][row : row + 1, start:end] for name in PACKED}
            supervised = int((one["labels"][:, 1:] != IGNORED).sum())
            if supervised or not micro.supervised:
                # A mask in place of the positions: no code that tells packed samples apart has a part in it.
                del one["position_ids"]
                one["attention_mask"] = torch.ones_like(one["input_ids"])
                found.append(replace(micro, tensors=one, supervised=supervised))
    return found


def reversed_order(window: Window) -> Grouped:
    """Micro-batches and ranks summed the other way round."""
    return [(micro, [at]) for at, (_, micro) in reversed(list(enumerate(window)))]


def rows_flipped(window: Window) -> Grouped:
    """The rows of every micro-batch in the other order."""
    return [(_mapped(micro, lambda t: t.flip(0)), [at]) for at, (_, micro) in enumerate(window)]


def rows_apart(window: Window) -> Grouped:
    """Every row a micro-batch of its own, without padding; every sample, where rows hold several."""
    found: Grouped = []
    for at, (_, micro) in enumerate(window):
        if is_packed(micro):
            found += [(sample, [at]) for sample in _samples(micro)]
            continue
        for row in range(micro.tensors["input_ids"].shape[0]):
            one = {name: tensor[row : row + 1] for name, tensor in micro.tensors.items()}
            length = max(1, int(one["attention_mask"].sum()))
            narrow = {name: t[:, :length] if _beside_inputs(name, t, one) else t for name, t in one.items()}
            labels = narrow["labels"]
            shifted = labels[:, 1:] if labels.shape == narrow["input_ids"].shape else labels
            supervised = int((shifted != IGNORED).sum()) if micro.supervised else 0
            found.append((replace(micro, tensors=narrow, supervised=supervised), [at]))
    return found


def all_together(window: Window) -> Grouped:
    """The whole window as one batch."""
    micros = [micro for _, micro in window]
    if is_packed(micros[0]):  # one long row: flash attention takes packed samples in no other way
        flat = {name: torch.cat([micro.tensors[name].reshape(1, -1) for micro in micros], 1) for name in PACKED}
        whole = replace(micros[0], tensors=flat, supervised=sum(micro.supervised for micro in micros))
        return [(whole, list(range(len(micros))))]
    tensors = {
        name: _stacked([micro.tensors[name] for micro in micros], IGNORED if name == "labels" else 0)
        for name in micros[0].tensors
    }
    whole = replace(micros[0], tensors=tensors, supervised=sum(micro.supervised for micro in micros))
    return [(whole, list(range(len(micros))))]


def _beside_inputs(name: str, tensor: torch.Tensor, one: dict[str, torch.Tensor]) -> bool:
    return tensor.ndim == 2 and (name != "labels" or tensor.shape == one["input_ids"].shape)


def _mapped(micro: MicroBatch, change: object) -> MicroBatch:
    assert callable(change)
    return replace(micro, tensors={name: change(tensor) for name, tensor in micro.tensors.items()})


def _stacked(tensors: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    width = max(t.shape[1] for t in tensors)
    return torch.cat([functional.pad(t, (0, width - t.shape[1]), value=fill) for t in tensors])
