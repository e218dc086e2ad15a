"""What a traced step gives a device to do: floating-point operations, bytes read and written, kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Work:
    """``products``: floating-point operations of matrix products and convolutions in 16 bits, ``wide``: in 32.
    ``attention``: those of attention kernels, without what a causal mask skips. ``operands``: bytes that products and
    attention read and write. ``moved``: bytes that all other kernels read and write. ``kernels``: how many of all."""

    products: float = 0
    wide: float = 0
    attention: float = 0
    operands: float = 0
    moved: float = 0
    kernels: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * getattr(self, f.name) for f in fields(self)))

    def toward(self, other: Work, steps: float) -> Work:
        """On the straight line through both: this at 0 ``steps``, the other at 1."""
        return self + (other + self * -1) * steps
