"""Moments in 8 bits: whether each stored code is the one that the right value rounds to, under the right scale."""

from __future__ import annotations

import torch

from toolkit.optim.adamw8bit import BLOCK, table

_SAME = 1e-5
"""Relative distance of float32 numbers that one formula gives: some roundings."""


def distance(stored: torch.Tensor, scales: torch.Tensor, right: torch.Tensor, signed: bool) -> tuple[float, float]:
    """How far ``right`` is outside of what the stored codes stand for, and how far the scales are from the largest of
    their blocks; both 2-norms relative to those of ``right`` and of the largest.

    A code stands for all that is nearer to its value than to another's; rounding is no error as far as that goes. All
    tensors are whole; a run of equal scales is a block.
    """
    least, most = _cells(stored, scales, signed)
    right = right.double()
    outside = (least - right).clamp(min=0) + (right - most).clamp(min=0)
    flat = scales.reshape(-1).double()
    _, run, lengths = torch.unique_consecutive(flat, return_inverse=True, return_counts=True)
    largest = torch.zeros(len(lengths), dtype=torch.float64)
    largest = largest.scatter_reduce(0, run, right.abs().reshape(-1), "amax")
    kept = flat[torch.cumsum(lengths, 0) - 1]
    # A scale of more than a block is wrong, unless each of its blocks has a largest element of that size (16-bit
    # gradients take few values; blocks of zeros).
    at_most = (right.abs().reshape(-1) >= (1 - _SAME) * flat).long()
    reached = torch.zeros(len(lengths), dtype=torch.long).scatter_add(0, run, at_most)
    shared = (lengths > BLOCK) & (reached < torch.ceil(lengths / BLOCK))
    wrong = torch.where(shared, kept, (kept - largest).abs())
    return _relative(outside, right), _relative(wrong, largest)


def half_cells(stored: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """How far each stored value can be from what it was rounded from."""
    least, most = _cells(stored, scales, signed)
    return torch.maximum(stored.double() - least, most - stored.double()).clamp(min=0)


def _cells(stored: torch.Tensor, scales: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor(table(signed), dtype=torch.float64)
    middles = (values[:-1] + values[1:]) / 2
    codes = torch.bucketize(stored.double() / scales.double().clamp(min=1e-300), middles)
    if not signed:
        middles[0] = 0.0  # a second moment that is not zero is rounded up to the smallest value
    low, high = torch.cat([values[:1], middles]), torch.cat([middles, values[-1:]])
    return low[codes] * scales.double(), high[codes] * scales.double()


def _relative(error: torch.Tensor, right: torch.Tensor) -> float:
    found = error.double().norm().item()
    size = right.double().norm().item()
    return found / size if size else (0.0 if found == 0 else float("inf"))
