"""A run that ends because there is no memory: where it was, what it asked for, and what it had taken."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import torch

from toolkit.errors import OutOfMemory
from toolkit.training.metrics import peak_memory_bytes
from toolkit.training.watch import Beat

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, says that there is no memory: of torch's CUDA allocator, of its CPU allocator
    (a RuntimeError), or Python's own."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(one, RuntimeError) and "DefaultCPUAllocator" in str(one):
            return True
        one = one.__cause__ or one.__context__
    return False


def told(error: BaseException, beat: Beat, rank: int, device: torch.device) -> OutOfMemory:
    """The error for the user. ``beat``: where the rank was."""
    text = str(error)
    size, unit = match.groups() if (match := _ASKED.search(text)) else (None, None)
    asked = "" if size is None or unit is None else f"{float(size) * _UNITS[unit] / _GIB:.2f} GiB asked for, "
    place = f"at step {beat.step}, {beat.place}" if beat.step else beat.place
    now, limit = _taken(device)
    message = (
        f"rank {rank} is out of memory {place}: {asked}{now / _GIB:.2f} GiB allocated, "
        f"{peak_memory_bytes(device) / _GIB:.2f} GiB at the peak before, {limit / _GIB:.1f} GiB "
        f"{'on the device' if device.type == 'cuda' else 'for the process'}"
    )
    return OutOfMemory(message, limit / _GIB if device.type == "cuda" else None)


def _taken(device: torch.device) -> tuple[int, int]:
    """Bytes that this process has allocated, and that it can have at most."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    page = resource.getpagesize()
    total = page * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return pages * page, total if limit < 0 else min(total, limit)
