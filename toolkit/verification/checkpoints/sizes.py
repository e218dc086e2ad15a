"""Two tensors of one name, as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from toolkit.verification.checkpoints.contents import HALF, MOMENTS, Checkpoint, StoredTensor


@dataclass(frozen=True)
class Sizes:
    """Of one tensor of both sides, in float64. ``a``, ``b``: 2-norms; ``inner``: the scalar product of both;
    ``difference``: the 2-norm of the difference."""

    a: float
    b: float
    inner: float
    difference: float
    elements: int

    @property
    def factor(self) -> float:
        """The multiple of A's tensor that is nearest to B's."""
        return self.inner / self.a**2 if self.a > 0 else math.nan

    @property
    def beyond_factor(self) -> float:
        """What is left of B's when that multiple is taken off, relative to B's."""
        if self.a == 0 or self.b == 0:
            return math.nan
        return math.sqrt(max(0.0, 1 - (self.inner / (self.a * self.b)) ** 2))


def measured(a: StoredTensor, b: StoredTensor, rounded: bool) -> Sizes:
    """``rounded``: where one side has a 16-bit copy, round the other to it."""
    left, right = a.read(), b.read()
    half = next((d for d in HALF.values() if d in (left.dtype, right.dtype) and left.dtype != right.dtype), None)
    if rounded and half is not None:
        left, right = left.to(half), right.to(half)
    left, right = left.reshape(-1).double(), right.reshape(-1).double()
    return Sizes(
        left.norm().item(),
        right.norm().item(),
        torch.dot(left, right).item(),
        (left - right).norm().item(),
        left.numel(),
    )


def relative(sizes: Sizes) -> float:
    """The difference relative to the larger of both; 0 where both are zero, not a number where one is not finite."""
    if sizes.difference == 0.0:
        return 0.0
    return sizes.difference / max(sizes.a, sizes.b)


def largest_spread(sizes: dict[str, Sizes]) -> float:
    """The largest root mean square of any tensor of B."""
    return max((one.b / math.sqrt(max(1, one.elements)) for one in sizes.values()), default=0.0)


def summary(sizes: dict[str, Sizes]) -> str:
    equal = sum(one.difference == 0.0 for one in sizes.values())
    return f"{equal} of {len(sizes)} bit-equal"


def precision(checkpoint: Checkpoint) -> str:
    """The dtype of the moments' values, whatever they are stored in: 16 bits if the first tensors that are not zero are
    all numbers of that dtype."""
    tensors: list[torch.Tensor] = []
    for stored in (one for moment in MOMENTS for one in checkpoint.moments[moment].values()):
        tensor = stored.read()
        if tensor.any():
            tensors.append(tensor)
        if len(tensors) == 4:
            break
    for name, half in HALF.items():
        if tensors and all(torch.equal(one.float(), one.to(half).float()) for one in tensors):
            return name
    return "float32"
