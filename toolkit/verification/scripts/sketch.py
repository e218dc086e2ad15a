"""A tensor in a few thousand sums, from which its norm, and that of any linear combination of tensors, can be told.

Whole weights, gradients and moments of every recorded step would be a dozen copies of a model. A sketch multiplies the
elements by fixed signs and adds them up in ``BUCKETS`` sums (Charikar, Chen, Farach-Colton, «Finding Frequent Items in
Data Streams», ICALP 2002). It is linear: the sketch of a difference is the difference of the sketches. The squared
2-norm of a sketch has that of the tensor as its mean, with a relative variance of at most 2 / BUCKETS (Alon, Matias,
Szegedy, STOC 1996): a norm is told to 1.1 % (one standard deviation), whatever the tensor is, and a difference of zero
is exactly zero. Tensors of up to ``EXACT`` elements are kept whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

BUCKETS = 4099
"""A prime: rows of a matrix, whose lengths are powers of two and multiples of them, do not fall on the same sums."""
EXACT = 65_536
NORM_SLACK = 1.12
"""What a norm from a sketch may be larger by than the tensor's own, at most: ten standard deviations."""
_ROWS = 256
"""Rows of signs for the elements of one chunk, of which a chunk begins at its own."""


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """float64 of shape (n,): the elements of a tensor of at most ``EXACT``, else (``BUCKETS``,), on the CPU.

    Sketches of tensors of one shape can be added and multiplied by numbers as the tensors can.
    """
    flat = tensor.detach().reshape(-1)
    return sketch_of(flat.numel(), lambda begin, end: flat[begin:end].to("cpu", torch.float64, copy=True))


def sketch_of(elements: int, read: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The sketch of a tensor that is not there: ``read(begin, end)`` gives these of its elements, float64 on the
    CPU."""
    if elements <= EXACT:
        return read(0, elements)
    sums = torch.zeros(BUCKETS, dtype=torch.float64)
    size = _ROWS * BUCKETS
    for number, begin in enumerate(range(0, elements, size)):
        part = read(begin, min(begin + size, elements))
        if missing := -part.numel() % BUCKETS:
            part = torch.nn.functional.pad(part, (0, missing))
        rows, (first, signs) = part.view(-1, BUCKETS), _chunk(number)
        sums += signs * (rows * _signs()[first : first + rows.shape[0]]).sum(0)
    return sums


def norm(values: torch.Tensor) -> float:
    """The 2-norm that a sketch tells."""
    return float(torch.linalg.vector_norm(values))


def distance(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """2-norm of the difference over that of ``expected``, from two sketches; 0 where both are zero, inf where only
    ``expected`` is."""
    off = norm(seen - expected)
    if off == 0.0:
        return 0.0
    size = norm(expected)
    return off / size if size > 0 else float("inf")


@functools.cache
def _signs() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (2 * _ROWS, BUCKETS), generator=draw, dtype=torch.int8) * 2 - 1).double()


@functools.lru_cache(4096)
def _chunk(number: int) -> tuple[int, torch.Tensor]:
    """The first row of signs of a chunk, and a sign of its own for each sum."""
    draw = torch.Generator().manual_seed(1 + number)
    first = int(torch.randint(0, _ROWS + 1, (), generator=draw))
    return first, torch.randint(0, 2, (BUCKETS,), generator=draw, dtype=torch.int8) * 2 - 1
