"""Measured tolerances: how far correct runs differ, tensor by tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch

SAFETY = 4.0
"""A candidate is one more correct run beside the few that measured the noise. Of 20 random orders and splits of a
window, the worst tensor erred at most 1.8 times as much as in those few (llama, qwen3, gpt2 and bert, in fp32 and
bf16; tests/verify/test_tolerance.py); four leaves a factor of two on that."""


DRAW_SAFETY = 2.0
"""The perturbation by one machine epsilon is a single draw of signs. Of 20 draws on an adapter that trains already (the
demo's short windows) the largest was 1.1 times the first at the median tensor and 1.47 times at the worst; two leaves
room on that (tests/verify/test_tolerance.py)."""


NO_SIGNAL = 0.1
"""A tensor whose correct gradients differ by more carries no signal (a key's bias: softmax does not see it)."""


@dataclass
class Noise:
    """Differences between correct runs, by tensor (``loss`` for the forward), pooled over steps: relative ones, and
    of those that rearranged the window the absolute ones. What cancels in a sum leaves its rounding: a gradient that is
    small at one step has the absolute noise of the others."""

    rearranged: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    perturbed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    absolute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shaken: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Products in float8: of runs in which every operand was off by one rounding before it was rounded to float8, the
    largest of some. A candidate whose operands differ at all comes near it: values fall to other float8 numbers."""
    eps: float = torch.finfo(torch.float32).eps
    compute_eps: float = torch.finfo(torch.float32).eps
    apart: dict[int, dict[str, float]] = field(default_factory=dict)
    """Packed: by step, how far the plain loop's own loss and gradients are from those of every sample alone. That is
    no noise but something to be proven: samples that share a row do not see each other."""

    def of(self, name: str, size: float = math.inf) -> float:
        """The noise that is told: the largest difference seen between two correct runs, relative to ``size``."""
        return max(self._drawn(name, size), self.perturbed.get(name, 0.0), self.shaken.get(name, 0.0))

    def tolerance(self, name: str, size: float = math.inf) -> float:
        """Relative tolerance of a tensor whose right value has 2-norm ``size``.

        Orders and splits are draws of what may differ, and get the safety factor. Perturbing the embedding by one
        machine epsilon overstates rounding 4 to 8 times on a random model, hardly on an adapter that trains already:
        it gets that of its own draw, unless all of the tensor is rounding. Never below 4 roundings.
        """
        if self.of(name, size) >= NO_SIGNAL:
            return SAFETY * self.of(name, size)
        # In float32 it is one draw of a rounding that the candidate draws anew. In 16 bits the candidate stays far
        # below it.
        float32 = self.compute_eps == torch.finfo(torch.float32).eps
        perturbed = self.perturbed.get(name, 0.0) * (DRAW_SAFETY if float32 else 1.0)
        shaken = DRAW_SAFETY * self.shaken.get(name, 0.0)
        return max(SAFETY * self._drawn(name, size), perturbed, shaken)

    def _drawn(self, name: str, size: float) -> float:
        spread = self.absolute.get(name, 0.0) / size if size > 0 else 0.0
        return max(self.rearranged.get(name, 0.0), spread, self.eps)


def relative_error(seen: torch.Tensor, right: torch.Tensor) -> float:
    """2-norm of the difference over that of ``right``, in float64; 0 where both are zero, inf where only one is."""
    difference = (seen.double() - right.double()).norm().item()
    if difference == 0.0:
        return 0.0
    size = right.double().norm().item()
    return difference / size if size > 0 else float("inf")
