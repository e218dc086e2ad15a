"""Which errors say that there was no memory, and how much was asked for. Imports nothing: processes that have not
imported torch ask, too."""

from __future__ import annotations

import errno
import re

_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SAID = re.compile(r"out of memory|DefaultCPUAllocator|cannot allocate memory|CUDNN_STATUS_ALLOC_FAILED", re.IGNORECASE)
"""Of CUDA and NCCL, torch's CPU allocator, the operating system (mmap, fork), and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, says that there is no memory: torch's OutOfMemoryError, Python's MemoryError, a
    RuntimeError with the words of CUDA or of torch's CPU allocator, an OSError of the operating system."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, MemoryError) or any(base.__name__ == "OutOfMemoryError" for base in type(one).__mro__):
            return True
        if isinstance(one, RuntimeError) and _SAID.search(str(one)):
            return True
        if isinstance(one, OSError) and one.errno == errno.ENOMEM:
            return True
        one = one.__cause__ or one.__context__
    return False


def asked_bytes(text: str) -> int | None:
    """The bytes that an allocator's message says were asked for; None if it does not say."""
    match = _ASKED.search(text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])
