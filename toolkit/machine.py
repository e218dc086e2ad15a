"""What this machine has, told without importing torch."""

from __future__ import annotations

import ctypes
import functools
import os


@functools.cache
def cuda_device_count() -> int:
    """NVIDIA GPUs visible to this process, asked of the driver itself; 0 without a driver.

    ``cuInit`` honours CUDA_VISIBLE_DEVICES (CUDA driver API, «Initialization»); torch counts the same way.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def cpu_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
