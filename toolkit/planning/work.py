"""What a traced step gives a device to do: floating-point operations, bytes read and written, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple


class Attention(NamedTuple):
    """A kernel of attention: ``flash`` or ``efficient``. ``width``: elements of a head. ``length``: tokens of a row."""

    name: str
    backward: bool
    width: int
    length: int
    causal: bool


@dataclass(frozen=True)
class Work:
    """``products``: floating-point operations of matrix products and convolutions in 16 bits, ``wide``: in 32.
    ``operands``: bytes that products and attention read and write. ``moved``: bytes that all other kernels read and
    write. ``kernels``: how many of all. ``attention``: floating-point operations by kernel of attention, without what a
    causal mask skips."""

    products: float = 0
    wide: float = 0
    operands: float = 0
    moved: float = 0
    kernels: float = 0
    attention: Mapping[Attention, float] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        attention = {
            kernel: self.attention.get(kernel, 0) + other.attention.get(kernel, 0)
            for kernel in {**self.attention, **other.attention}
        }
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in NUMBERS}, attention=attention)

    def __mul__(self, times: float) -> Work:
        attention = {kernel: times * count for kernel, count in self.attention.items()}
        return Work(**{name: times * getattr(self, name) for name in NUMBERS}, attention=attention)

    def toward(self, other: Work, steps: float) -> Work:
        """On the straight line through both: this at 0 ``steps``, the other at 1."""
        return self + (other + self * -1) * steps


NUMBERS = tuple(one.name for one in fields(Work) if one.name != "attention")
