"""Memory of this process, and bytes that it reads and writes (Linux)."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

MIB = 2**20


def status(key: str) -> int:
    """Bytes: ``VmRSS`` is resident now, ``VmHWM`` was at most since ``forget_peak``."""
    return _number("/proc/self/status", key) * 1024


def forget_peak() -> int:
    """Give what is free to the system and begin a new peak; bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return status("VmRSS")


def moved(key: str) -> int:
    """Bytes by calls of ``read`` (``rchar``) or ``write`` (``wchar``); what is mapped does not count."""
    return _number("/proc/self/io", key)


def available() -> int:
    """Bytes of memory that this machine has left."""
    return _number("/proc/meminfo", "MemAvailable") * 1024


def _number(file: str, key: str) -> int:
    [line] = [line for line in Path(file).read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1])
