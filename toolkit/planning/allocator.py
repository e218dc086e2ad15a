"""What a process takes on a GPU beyond the bytes of its tensors, as an interval.

PyTorch's caching allocator keeps what was freed, in blocks that later tensors fill only in part
(c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 bytes; up to 1 MiB come from blocks of 2 MiB, up to 10 MiB
from blocks of 20 MiB, larger ones from blocks of their own, rounded to 2 MiB, whose rest is used only by what fits into
it. How much stays unused depends on the order of all allocations, which a plan does not have, so three numbers are
fitted to the peaks of 51 published runs that nvidia-smi showed (docs/measurements/outside.md):

    process = peak + FIXED + TRANSIENT x (peak - what stays for the whole step) + LOSS x (what the loss adds)

Weights and moments leave no gaps, tensors of a micro-batch do. The logits are by far the largest tensors of a step;
where one of them was, smaller ones settle, and the next one finds no place.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.planning.hardware import GIB
from toolkit.planning.memory import Memory

FIXED = 1.45 * GIB
"""CUDA context, kernels and NCCL's buffers; of these ``CONTEXT`` are not the allocator's."""
CONTEXT = int(0.5 * GIB)
"""CUDA context and loaded kernels: assumed, since no GPU has been measured (see docs/planning.md)."""
TRANSIENT, LOSS = 0.195, 0.456
LOW, HIGH = 0.888, 1.230
"""Measured by predicted: a twentieth and nineteen twentieths of the 51 rows."""


@dataclass(frozen=True)
class Parts:
    """Bytes of a prediction. ``peak``: of tensors. ``transient``: of those that do not stay for the whole step.
    ``loss``: what the phase of the loss has more than the forward."""

    peak: float
    transient: float
    loss: float

    @classmethod
    def of(cls, memory: Memory) -> Parts:
        """Those of a predicted step."""
        more = memory.phases.get("loss", 0) - memory.phases.get("forward", 0)
        return cls(memory.peak, max(0, memory.peak - memory.stays), max(0, more))

    def process(self) -> float:
        """Bytes that nvidia-smi shows, without the interval."""
        return self.peak + FIXED + TRANSIENT * self.transient + LOSS * self.loss


def process_interval(parts: Parts, device: int) -> tuple[int, int]:
    """Bytes from and to that a process takes on a device of ``device`` bytes. It has no more than the device has, whose
    allocator frees its cache first; and never less than its tensors."""
    expected = min(device, parts.process())
    least, most = max(parts.peak, LOW * expected), max(parts.peak, HIGH * expected)
    return int(min(device, least)), int(min(device, most))
