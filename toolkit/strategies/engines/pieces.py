"""Pieces of tensors: which part of a trained weight, or of a moment, a rank owns.

A piece is a box (FSDP2's shards, a start and a size per dimension) or a range of the flattened tensor (ZeRO's
partitions, FSDP1's slices). A range is a box of the tensor seen with one dimension. A box of whole rows is a range too,
and is always written as one, so that pieces of different strategies overlap in few runs of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """``start`` and ``size`` per dimension of a tensor; with one number each, of the tensor flattened."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def flat(self) -> bool:
        """Whether it is a range of the flattened tensor."""
        return len(self.start) == 1


Values = list[tuple[Piece, torch.Tensor]]
"""Pieces with their elements: a tensor of ``numel`` elements each, in order, of any shape."""


@dataclass
class Owned:
    """What this rank owns of one trained parameter; the pieces of all ranks make up each tensor once.

    ``shapes``: of each whole moment. ``step``: the optimizer's count, None where this rank has no state of it.
    """

    weight: Values
    moments: dict[str, Values]
    shapes: dict[str, Shape]
    step: int | None


@dataclass
class Saved:
    """One trained parameter in a checkpoint. ``weight`` and ``moment`` read one piece into a tensor of its own, flat if
    the piece is a range; None: all of it, in its shape. ``step``: None where there are no moments."""

    step: int | None
    weight: Callable[[Piece | None], torch.Tensor]
    moment: Callable[[str, Piece | None], torch.Tensor]


def span(start: int, stop: int) -> Piece:
    """Elements ``start`` to ``stop`` of a flattened tensor."""
    return Piece((start,), (stop - start,))


def whole(shape: Shape) -> Piece:
    """All elements of a tensor."""
    return span(0, math.prod(shape))


def box(start: Shape, size: Shape, shape: Shape) -> Piece:
    """A box of a tensor of this shape; a range where its elements follow each other."""
    if not math.prod(size):
        return span(0, 0)
    piece = Piece(start, size)
    if not shape or math.prod(size[: _inner(piece, shape)]) == 1:
        first = sum(at * stride for at, stride in zip(start, _strides(shape), strict=True))
        return span(first, first + piece.numel)
    return piece


def cut(piece: Piece, most: int) -> Iterator[tuple[Piece, slice]]:
    """``piece`` in parts of up to ``most`` elements, and which of its elements in order each is. A box stays whole."""
    if not piece.flat:
        yield piece, slice(0, piece.numel)
        return
    for start in range(0, piece.numel, most):
        stop = min(start + most, piece.numel)
        yield span(piece.start[0] + start, piece.start[0] + stop), slice(start, stop)


def overlap(one: Piece, other: Piece, shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Runs of elements that both have: the place in ``one``, the place in ``other``, each counted in the order of its
    own elements, and the length."""
    for (a, length_a, at_a), (b, length_b, at_b) in _crossing(one, other, shape):
        first, last = max(a, b), min(a + length_a, b + length_b)
        if first < last:
            yield at_a + first - a, at_b + first - b, last - first


Run = tuple[int, int, int]
"""A run of elements: its place in the flattened tensor, its length, its place in the piece."""


def _crossing(one: Piece, other: Piece, shape: Shape) -> Iterator[tuple[Run, Run]]:
    """Pairs of runs that may overlap. Both are in order, so that each is walked once."""
    left, right = _runs(one, shape), _runs(other, shape)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        yield a, b
        if a[0] + a[1] <= b[0] + b[1]:
            a = next(left, None)
        else:
            b = next(right, None)


def _runs(piece: Piece, shape: Shape) -> Iterator[Run]:
    """The longest runs of consecutive elements of a piece, in order."""
    if piece.flat:
        yield piece.start[0], piece.size[0], 0
        return
    strides, inner = _strides(shape), _inner(piece, shape)
    length = piece.size[inner] * strides[inner]
    begin = sum(start * stride for start, stride in zip(piece.start, strides, strict=True))
    outer = [range(size) for size in piece.size[:inner]]
    for number, places in enumerate(product(*outer)):
        yield begin + sum(at * stride for at, stride in zip(places, strides, strict=False)), length, number * length


def _strides(shape: Shape) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def _inner(piece: Piece, shape: Shape) -> int:
    """The dimension from which on elements of a box follow each other: all later ones are whole."""
    inner = len(shape) - 1
    while inner > 0 and piece.size[inner] == shape[inner]:
        inner -= 1
    return inner


Places = slice | torch.Tensor
"""Which elements of a piece, in its order."""


def within(
    piece: Piece, shape: Shape, dim: int, index: int, count: int, runs: int = 1
) -> Iterator[tuple[Piece, Places]]:
    """A piece of a part as pieces of the whole, and which of its elements each has.

    ``shape``: of the part, which is number ``index`` of ``count`` equal ones along ``dim``, 0 or 1. ``runs``: so many
    equal runs make up the rows of a matrix, and of each it is that part.
    """
    sizes = tuple(size * count if at == dim else size for at, size in enumerate(shape))
    offset = tuple(index * size if at == dim else 0 for at, size in enumerate(shape))
    if not piece.numel:
        return
    if runs > 1:
        if dim != 1 or len(shape) != 2 or not piece.flat:
            raise AssertionError(f"{piece} of {shape} in {runs} runs along dimension {dim}")
        yield from _within_runs(piece, (shape[0], shape[1]), index, count, runs)
        return
    if not piece.flat:
        start = tuple(map(sum, zip(piece.start, offset, strict=True)))
        yield box(start, piece.size, sizes), slice(0, piece.numel)
        return
    row = math.prod(shape[1:])
    if dim == 0:
        first = piece.start[0] + index * shape[0] * row
        yield span(first, first + piece.numel), slice(0, piece.numel)
        return
    first, last = piece.start[0], piece.start[0] + piece.size[0]
    at = first
    inner = math.prod(shape[2:])
    while at < last:
        outer, place = divmod(at, row)
        if place == 0 and last - at >= row:  # whole rows of the part
            rows = (last - at) // row
            begin, size = (outer, *offset[1:]), (rows, *shape[1:])
        else:
            stop = min(last, (outer + 1) * row)
            if place % inner or (stop - at) % inner:
                raise AssertionError(f"{piece} of {shape} cuts through dimension 2")
            begin = (outer, offset[1] + place // inner, *offset[2:])
            size = (1, (stop - at) // inner, *shape[2:])
        length = math.prod(size)
        yield box(begin, size, sizes), slice(at - first, at - first + length)
        at += length


def _within_runs(
    piece: Piece, shape: tuple[int, int], index: int, count: int, runs: int
) -> Iterator[tuple[Piece, Places]]:
    """As ``within``, of a range: a box for each run of whole rows, a range for each run of a row that is cut."""
    length, sizes = shape[1], (shape[0], shape[1] * count)
    each = length // runs
    first, last = piece.start[0], piece.start[0] + piece.size[0]
    at = first
    while at < last:
        row, place = divmod(at, length)
        rows = 1 if place else max(1, (last - at) // length)
        stop = min(last, (row + rows) * length)
        for run in range(place // each, -(-(stop - (row + rows - 1) * length) // each)):
            begin = max(place, run * each)
            end = min(stop - (row + rows - 1) * length, (run + 1) * each)
            column = run * each * count + index * each + begin - run * each
            columns = torch.arange(begin - place, end - place)
            places = (at - first + torch.arange(rows).unsqueeze(1) * length + columns).reshape(-1)
            yield box((row, column), (rows, end - begin), sizes), places
        at = stop
