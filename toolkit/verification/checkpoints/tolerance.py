"""How far correct runs of one recipe are apart, measured; what is beyond it is a difference.

The figures are the largest of any one tensor between any two of: a llama of two layers under single, ddp, zero2, zero3
and fsdp2, with the same samples and schedule (tests/verify/test_checkpoint_tolerance.py measures that again); a plain
loop with sdpa and with eager attention, in micro-batches of 1, 2 and 4 rows, on 1 and 2 threads; and the same with the
biases of qwen2, whose keys have hardly a gradient.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from toolkit.verification.checkpoints.compare import Sizes

STEPS = (1, 5, 20, 100)
"""Optimizer steps at which the distances were measured. Between two of them the later one's are used; beyond the last
they grow with the number of steps, which is an extrapolation."""

DISTANCES: dict[str, dict[str, tuple[float, ...]]] = {
    "float32": {
        "exp_avg": (4.4e-7, 4.9e-7, 6.3e-7, 6.0e-6),
        "exp_avg_sq": (6.0e-7, 6.0e-7, 6.0e-7, 9.0e-7),
        "weight": (5.9e-6, 4.2e-6, 2.1e-6, 5.2e-7),
        "weak weight": (1.4e-4, 4.1e-5, 3.0e-5, 3.0e-5),
    },
    "bfloat16": {
        "exp_avg": (9.6e-3, 1.7e-2, 1.9e-2, 3.8e-1),
        "exp_avg_sq": (1.7e-2, 1.7e-2, 1.7e-2, 2.2e-2),
        "weight": (1.2e-1, 2.6e-2, 7.4e-3, 4.6e-3),
        "weak weight": (5.3e-1, 4.4e-1, 2.6e-1, 2.6e-1),
    },
}
"""By dtype of the forward pass. Moments: the 2-norm of the difference relative to the moment. Weights: relative to the
farthest that AdamW can move them, the sum of learning rates times the root of the number of elements: where a gradient
is near zero, rounding decides the sign of the first updates, so shares fall with the number of steps. float16 has
bfloat16's, which has fewer bits."""

FLOOR = {
    "float32": {"exp_avg": 2.0e-9, "exp_avg_sq": 3.0e-12},
    "bfloat16": {"exp_avg": 4.6e-5, "exp_avg_sq": 7.8e-8},
}
"""Distances of the moments of qwen2's key biases, relative to the largest root mean square of any tensor's: what
cancels in a sum leaves its rounding, so a tensor with hardly a gradient has the absolute noise of the others."""

WEAK = 1e-2
"""A tensor whose first moment has a smaller root mean square than this share of the largest tensor's is weak."""

SAFETY = 4.0
"""Two checkpoints are one more pair of correct runs beside the few that were measured: room, not a model. `toolkit
verify`, which measures the very recipe, states the chance of a false alarm."""

ROUNDINGS = 4.0
"""Roundings of a float32 weight that any two runs may differ by, whatever the learning rate. Measured: 0.7 after 20 and
1.7 after 100 steps; they grow with the root of the number of steps."""


@dataclass(frozen=True)
class Tolerance:
    """Of tensors after ``step`` optimizer steps (None: not known, the widest is used). ``override``: instead of all."""

    step: int | None
    compute: str
    override: float | None = None

    def weight(self, sizes: Sizes, moved: float | None, weak: bool, half: torch.dtype | None) -> float:
        """Relative tolerance of a weight. ``moved``: steps times the largest learning rate; without it the rate is
        taken to be 1e-3. ``half``: the weights were rounded to this dtype."""
        if self.override is not None:
            return self.override
        size = max(sizes.a, sizes.b)
        eps = torch.finfo(half or torch.float32).eps
        rounding = eps if half else eps * max(ROUNDINGS, math.sqrt(self.step or STEPS[-1]))
        if size == 0.0:
            return rounding
        moved = (self.step or STEPS[-1]) * 1e-3 if moved is None else moved
        share = min(1.0, SAFETY * self._distance("weak weight" if weak else "weight", grows=False))
        return rounding + share * moved * math.sqrt(sizes.elements) / size

    def moment(self, moment: str, sizes: Sizes, largest: float) -> float:
        """Relative tolerance of a moment. ``largest``: the largest root mean square of any tensor's."""
        if self.override is not None:
            return self.override
        root = math.sqrt(max(1, sizes.elements))
        size = max(sizes.a, sizes.b)
        floor = FLOOR[self._key][moment] * largest * root / size if size > 0 else 0.0
        return SAFETY * max(self._distance(moment, grows=True), floor)

    @property
    def _key(self) -> str:
        return "float32" if self.compute == "float32" else "bfloat16"

    @property
    def extrapolated(self) -> bool:
        """Whether more steps were taken than were measured."""
        return self.override is None and (self.step or 0) > STEPS[-1]

    def _distance(self, what: str, *, grows: bool) -> float:
        measured = DISTANCES[self._key][what]
        if self.step is None:
            return max(measured)
        if self.step > STEPS[-1]:
            return measured[-1] * (self.step / STEPS[-1] if grows else 1.0)
        return measured[bisect_left(STEPS, self.step)]
