"""The memory of a device by phase of a step: CUDA's own counters, or every storage counted where there is no GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from toolkit.planning.live import LiveBytes


class Meter:
    """``close(phase)`` ends a phase: its highest bytes are kept, and the next one starts from what is alive. A phase
    that comes again (the second step's forward) keeps the higher of both."""

    def __init__(self) -> None:
        self.baseline = 0
        """Bytes alive before the run: what earlier cells of this process left."""
        self.allocated: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.resting: dict[str, int] = {}
        """Bytes alive when the phase had ended."""

    def close(self, phase: str) -> None:
        """End ``phase``."""

    def to_json(self) -> dict[str, Any]:
        return {
            "baseline_bytes": self.baseline,
            "peak_allocated_bytes": max(self.allocated.values(), default=0),
            "peak_reserved_bytes": max(self.reserved.values(), default=None),
            "allocated_by_phase": self.allocated,
            "reserved_by_phase": self.reserved,
            "resting_by_phase": self.resting,
        }


class CudaMeter(Meter):
    """torch.cuda's counters of its caching allocator; the CUDA context and NCCL's buffers are not in them, they are
    in ``device_used_bytes``."""

    def __init__(self) -> None:
        super().__init__()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.baseline = torch.cuda.memory_allocated()
        self.device_used = 0

    def close(self, phase: str) -> None:
        torch.cuda.synchronize()  # what the phase has launched is the phase's
        self.allocated[phase] = max(self.allocated.get(phase, 0), torch.cuda.max_memory_allocated())
        self.reserved[phase] = max(self.reserved.get(phase, 0), torch.cuda.max_memory_reserved())
        self.resting[phase] = torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        self.device_used = max(self.device_used, total - free)
        torch.cuda.reset_peak_memory_stats()

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"device_used_bytes": self.device_used}


class StorageMeter(Meter):
    """Every storage that PyTorch's dispatcher sees; nothing is reserved on a CPU."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def close(self, phase: str) -> None:
        self.allocated[phase] = max(self.allocated.get(phase, 0), self.live.reset_peak())
        self.resting[phase] = self.live.live


@contextlib.contextmanager
def metered(device: str, by_phase: bool) -> Iterator[Meter]:
    """A meter for what runs inside. ``by_phase`` False: on a GPU the peak alone, without waiting for phases to end,
    and nothing on a CPU, where counting takes its time."""
    gc.collect()
    if device == "cuda":
        meter = CudaMeter()
        yield meter
        if not by_phase:
            meter.close("all")
    elif by_phase:
        with LiveBytes() as live:
            yield StorageMeter(live)
    else:
        yield Meter()


def release(device: str) -> int:
    """Give back what nobody holds; returns the bytes that are still alive on a GPU."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
