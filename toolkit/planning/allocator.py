"""What a process takes on a GPU beyond the bytes of its tensors, as an interval.

**What is there before a tensor is** (published figures, none measured by this project): the CUDA context with lazily
loaded kernels, cuBLAS' workspaces, NCCL's buffers.

**What the caching allocator keeps** of what was freed, in blocks that later tensors fill only in part
(c10/cuda/CUDACachingAllocator.cpp): sizes are rounded to 512 bytes; up to 1 MiB come from blocks of 2 MiB, up to 10 MiB
from blocks of 20 MiB, larger ones from blocks of their own, rounded to 2 MiB, whose rest is used only by what fits into
it. How much stays unused depends on the order of all allocations, which a plan does not have, so four numbers are
fitted to 89 published runs of kernels that a plan has (docs/measurements/outside.md):

    process = peak + fixed + TRANSIENT x t + LESSER x min(t, u) + LOSS x (what the loss adds) + SHARDED, if weights are

t: what the forward and backward have beyond what the update finds; u: what the update makes itself (moments stay, the
temporaries of foreach kernels do not). Weights and moments leave no gaps. What one of the two phases has freed is of
other sizes than what the other one takes, so that the lesser of both stays beside the greater. The logits are by far
the largest tensors of a step; where one of them was, smaller ones settle, and the next one finds no place. In a loop
that holds its outputs they stay where they are until the next step, and nothing settles there.
Sharded weights are gathered on streams of their own, whose blocks no other stream is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.planning.hardware import GIB
from toolkit.planning.memory import Memory

MIB = 2**20
TRANSIENT, LESSER, LOSS, SHARDED = 0.17, 1.25, 0.30, 1.17 * GIB
LOW, HIGH = 0.90, 1.12
"""Measured by predicted: a twentieth and nineteen twentieths of the 89 rows, each predicted with numbers that are
fitted to all the others."""


def context(device: str) -> int:
    """Bytes of a CUDA context with the kernels that training loads, on a device of the table."""
    # 141 MiB: nvidia-smi less reserved bytes, in each of 19 runs on a T4 with torch 2.14 and CUDA 13.0
    # (github.com/Anassbzdd/fitcheck, final-t4-20260921.json). Others: «around 400MB if CUDA >= 11.7 is used and lazy
    # module loading enabled» (github.com/pytorch/pytorch/issues/109888).
    return (141 if device == "t4" else 400) * MIB


def workspaces(device: str) -> int:
    """Bytes of cuBLAS' workspaces, of the thread of the forward and that of the backward: «:4096:2:16:8», on Hopper
    and later 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp, ``getChosenWorkspaceSize``)."""
    newer = device.startswith(("h100", "h200", "gh200", "b200", "b300", "rtx50"))
    return 2 * (32 * MIB if newer else (2 * 4096 + 8 * 16) * 1024)


def nccl(ranks: int) -> int:
    """Bytes of NCCL's buffers for one group of processes: 544 MiB for two A100s with NVLink, 688 MiB for more of them
    (github.com/NVIDIA/nccl/issues/964). Beyond two nodes there are no more
    (github.com/NVIDIA/nccl/issues/986)."""
    return (0 if ranks == 1 else 544 if ranks == 2 else 688) * MIB


def fixed(device: str, ranks: int) -> int:
    """Bytes of a process that has no tensor yet: context, workspaces and NCCL."""
    return context(device) + workspaces(device) + nccl(ranks)


@dataclass(frozen=True)
class Parts:
    """Bytes of a prediction. ``peak``: of tensors and cuBLAS' workspaces, which torch counts among them. ``transient``:
    what the forward and backward have beyond what the update finds. ``lesser``: of that and of what the update makes
    itself, the less. ``loss``: what the phase of the loss has more than the forward. ``fixed``: context and NCCL.
    ``sharded``: whether weights are gathered."""

    peak: float
    transient: float
    loss: float
    lesser: float = 0.0
    fixed: float = 0.0
    sharded: bool = False

    @classmethod
    def of(cls, memory: Memory, device: str, ranks: int, sharded: bool, holds_outputs: bool = False) -> Parts:
        """Those of a predicted step on a device of the table. ``holds_outputs``: whether what the model returns lives
        until the next step."""
        phases = memory.phases
        more = 0 if holds_outputs else max(0, phases.get("loss", 0) - phases.get("forward", 0))
        highest = max(phases.get(name, 0) for name in ("forward", "loss", "backward", "reduce", "evaluate"))
        passes, update = max(0, highest - memory.held), max(0, phases.get("step", 0) - memory.held)
        beyond = context(device) + nccl(ranks)
        return cls(memory.peak + workspaces(device), passes, more, min(passes, update), beyond, sharded)

    def process(self) -> float:
        """Bytes that nvidia-smi shows, without the interval, on a device that is large enough."""
        return self.peak + self.fixed + self.kept(TRANSIENT, LESSER, LOSS, SHARDED)

    def kept(self, transient: float, lesser: float, loss: float, sharded: float) -> float:
        """What the allocator keeps, by the four numbers."""
        return transient * self.transient + lesser * self.lesser + loss * self.loss + sharded * self.sharded

    def most(self) -> float:
        """The upper end of the interval, on a device that is large enough."""
        return HIGH * self.process()


def process_interval(parts: Parts, device: int) -> tuple[int, int]:
    """Bytes from and to that a process takes on a device of ``device`` bytes. It has no more than the device has, whose
    allocator frees its cache first; and never less than its tensors."""
    least = max(parts.peak, LOW * min(device, parts.process()))
    return int(min(device, least)), int(min(device, max(parts.peak, parts.most())))
