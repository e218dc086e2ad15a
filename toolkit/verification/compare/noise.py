"""Measured tolerances: how far correct runs differ, tensor by tensor, and how far one more of them may.

The model: a candidate's error in a tensor is one more draw beside those that were measured, of correct runs that add up
the same window in other orders and splits. A squared 2-norm of such an error is a sum of squares of independent
components. With ``n`` of them and the mean of K measured squares as its scale, the ratio has Fisher's F distribution
with n and K n degrees of freedom, and a tolerance with a stated chance to be exceeded is a quantile of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache

import torch

FALSE_ALARMS = 1e-6
"""The chance that a verdict on a right candidate has any measured comparison beyond its tolerance."""


COMPONENTS = 2
"""Of the error between two orders or splits. Over llama, bert, gpt2, qwen3 and mixtral in fp32, bf16 and fp16, full and
LoRA, two steps each, the squares of 12 draws a tensor varied as those of 3.7 to 13.9 components do. With 2, of 12,852
draws held against others of their tensor, 0.23 % exceeded what 1 % may, and 0.02 % what 0.1 % may (a part of it in
tests/verify/test_tolerance.py).

Where few roundings differ between orders, an error is there or not, which is no such distribution: on a CPU without
instructions for bfloat16, 2.3 % of 18,720 draws of bert exceeded what 1 % may (12 sets of 20 draws). An error that one
of 20 draws has is sqrt(20) = 4.5 times their scale, the largest that was seen; the factor at a verdict's own chance,
1e-9 a comparison, is 6.0. For one that no draw has, 16 bits have the perturbed embedding's tolerance besides: no error
was above 0.66 of the whole tolerance."""


SHAKEN_COMPONENTS = 8
"""Of the error between two runs whose operands differ by roundings before they are rounded to 8 bits: it has many. The
squares of 24 draws varied as those of 40 (llama) and 43 (qwen3) components do, in the least certain tensors as those of
5.5 and 8.7.

Where only the loss of a recorded call rounds otherwise, 48 draws of each tensor varied as those of 159 (llama), 37
(gpt2) and 87 components (qwen3), in the least certain tensors as those of 22, 15 and 5.6; under autocast 117, 28 and
100, and 14, 8.5 and 5.6."""


SAFETY = 4.0
"""Tolerance of what has two to four roundings, in the largest single one that was seen."""


DRAW_SAFETY = 2.0
"""The perturbation by one machine epsilon is a single draw of signs. Of 20 draws on an adapter that trains already (the
demo's short windows) the largest was 1.1 times the first at the median tensor and 1.47 times at the worst; two leaves
room on that (tests/verify/test_tolerance.py)."""


NO_SIGNAL = 0.1
"""A tensor whose correct gradients differ by more carries no signal (a key's bias: softmax does not see it)."""


@cache
def factor(draws: int, components: int, chance: float) -> float:
    """How many times the root mean square of ``draws`` errors one more exceeds with a probability of ``chance``.

    ``components`` must be even: the F distribution's tail is then a finite sum (Abramowitz and Stegun, 26.6.4).
    """
    half = draws * components / 2

    def tail(square: float) -> float:
        share = draws / (draws + square)
        term = total = 1.0
        for place in range(1, components // 2):
            term *= (half + place - 1) / place * (1 - share)
            total += term
        return share**half * total

    low, high = 0.0, 1.0
    while tail(high) > chance:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > chance else (low, middle)
    return math.sqrt(high)


@dataclass
class Draws:
    """Differences between correct runs in one tensor. ``relative``, ``absolute``: one of each draw, of all steps. What
    cancels in a sum leaves its rounding: a gradient that is small at one step has the absolute error of the others."""

    relative: list[float] = field(default_factory=list)
    absolute: list[float] = field(default_factory=list)

    def add(self, relative: float, absolute: float) -> None:
        """One more draw."""
        self.relative.append(relative)
        self.absolute.append(absolute)

    def scale(self, size: float) -> float:
        """Root mean square, relative to a right value of 2-norm ``size``."""
        shared = _rms(self.absolute) / size if size > 0 else 0.0
        return max(_rms(self.relative), shared)

    def largest(self, size: float) -> float:
        """The largest, relative to ``size``."""
        shared = max(self.absolute, default=0.0) / size if size > 0 else 0.0
        return max(*self.relative, shared, 0.0)


@dataclass
class Noise:
    """Differences between correct runs, by tensor (``loss`` for the forward), pooled over steps. ``comparisons``: how
    many a verdict makes with these tolerances."""

    arranged: dict[str, Draws] = field(default_factory=lambda: defaultdict(Draws))
    """Of runs that add up the window in another order or split."""
    scaled: dict[str, Draws] = field(default_factory=lambda: defaultdict(Draws))
    """Of the run with the loss multiplied by the number of ranks: no draw but what such a candidate does."""
    perturbed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    shaken: dict[str, Draws] = field(default_factory=lambda: defaultdict(Draws))
    """Options that round operands to fewer bits: of runs in which every operand was off by one rounding before. A
    candidate whose operands differ at all comes near it: values fall to other numbers. Recordings whose outputs are
    equal: of runs in which the loss rounds otherwise."""
    rounded: dict[str, Draws] = field(default_factory=lambda: defaultdict(Draws))
    """Compiled blocks, and options that fuse: of runs in which results of their operations were off by a rounding."""
    eps: float = torch.finfo(torch.float32).eps
    compute_eps: float = torch.finfo(torch.float32).eps
    comparisons: int = 1
    apart: dict[int, dict[str, float]] = field(default_factory=dict)
    """Packed: by step, how far the plain loop's own loss and gradients are from those of every sample alone. That is
    no noise but something to be proven: samples that share a row do not see each other."""

    @property
    def chance(self) -> float:
        """The chance that one right value is beyond its tolerance."""
        return FALSE_ALARMS / self.comparisons

    def of(self, name: str, size: float = math.inf) -> float:
        """The noise that is reported: the largest difference seen between two correct runs, relative to ``size``."""
        seen = (
            kind[name].largest(size) for kind in (self.arranged, self.scaled, self.shaken, self.rounded) if name in kind
        )
        return max(*seen, self.perturbed.get(name, 0.0), self.eps)

    def tolerance(self, name: str, size: float = math.inf) -> float:
        """Relative tolerance of a tensor whose right value has 2-norm ``size``. Never below 4 roundings.

        Perturbing the embedding by one machine epsilon overstates rounding 4 to 8 times on a random model, hardly on an
        adapter that trains already: it gets that of its own draw, unless all of the tensor is rounding.
        """
        if self.of(name, size) >= NO_SIGNAL:
            return SAFETY * self.of(name, size)
        # In float32 it is one draw of a rounding that the candidate draws anew. In 16 bits the candidate stays far
        # below it.
        float32 = self.compute_eps == torch.finfo(torch.float32).eps
        found = [self.perturbed.get(name, 0.0) * (DRAW_SAFETY if float32 else 1.0), SAFETY * self.eps]
        if name in self.scaled:
            found.append(SAFETY * self.scaled[name].largest(size))
        kinds = (self.arranged, COMPONENTS), (self.shaken, SHAKEN_COMPONENTS), (self.rounded, COMPONENTS)
        for kind, components in kinds:
            if name in kind:
                draws = kind[name]
                found.append(factor(len(draws.absolute), components, self.chance) * draws.scale(size))
        return max(found)


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0


def relative_error(seen: torch.Tensor, right: torch.Tensor) -> float:
    """2-norm of the difference over that of ``right``, in float64; 0 where both are zero, inf where only one is."""
    difference = (seen.double() - right.double()).norm().item()
    if difference == 0.0:
        return 0.0
    size = right.double().norm().item()
    return difference / size if size > 0 else float("inf")
