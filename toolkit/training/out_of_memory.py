"""A run that ends because there is no memory: where it was, what it asked for, and what it had taken."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from toolkit.errors import OutOfMemory
from toolkit.no_memory import asked_bytes
from toolkit.training.metrics import peak_memory_bytes
from toolkit.training.watch import Beat

_GIB = 2**30


def told(error: BaseException, beat: Beat, rank: int, device: torch.device) -> OutOfMemory:
    """The error for the user. ``beat``: where the rank was."""
    size = asked_bytes(str(error))
    asked = "" if size is None else f"{size / _GIB:.2f} GiB asked for, "
    place = f"at step {beat.step}, {beat.place}" if beat.step else beat.place
    peak = f"{peak_memory_bytes(device) / _GIB:.2f} GiB at the peak before"
    if device.type == "cuda":
        now, limit = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        taken = f"{now / _GIB:.2f} GiB allocated, {peak}, {limit / _GIB:.1f} GiB on the device"
        return OutOfMemory(f"rank {rank} is out of memory {place}: {asked}{taken}", limit / _GIB)
    page = resource.getpagesize()
    mapped, resident = (int(one) * page for one in Path("/proc/self/statm").read_text(encoding="ascii").split()[:2])
    total = page * os.sysconf("SC_PHYS_PAGES")
    taken = f"{resident / _GIB:.2f} GiB allocated, {peak}, {total / _GIB:.1f} GiB for the process"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limited := limit != resource.RLIM_INFINITY:
        taken += f"; {mapped / _GIB:.2f} of {limit / _GIB:.2f} GiB of address space are taken (ulimit -v)"
    return OutOfMemory(f"rank {rank} is out of memory {place}: {asked}{taken}", None, limit / _GIB if limited else None)
