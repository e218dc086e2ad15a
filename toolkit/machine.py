"""The hardware of this machine, determined without importing torch."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

READ_AT_ONCE = 2**24
"""Elements of a weight that are read at a time where a process reads its part of a model: what is read and what it is
cast to wait beside the part."""


@functools.cache
def cuda_device_count() -> int:
    """Number of NVIDIA GPUs visible to this process, from the driver; 0 without a driver.

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


@functools.cache
def compute_capabilities() -> tuple[tuple[int, int], ...]:
    """The (major, minor) compute capability of every GPU that ``cuda_device_count`` counts, from the driver."""
    if not (count := cuda_device_count()):
        return ()
    driver = ctypes.CDLL("libcuda.so.1")
    return tuple((_attribute(driver, 75, index), _attribute(driver, 76, index)) for index in range(count))


def _attribute(driver: ctypes.CDLL, attribute: int, index: int) -> int:
    """cuDeviceGetAttribute; 75 and 76 are the compute capability's major and minor (CUDA driver API,
    CUdevice_attribute). A device handle is its index."""
    value = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
    return value.value


_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU quota of a container: microseconds of CPU time per period, or «max»."""


def cpu_count() -> int:
    """Number of cores available to this process: its CPU affinity, limited by the cgroup v2 quota. launch.sh counts the
    same way."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def give_back_memory() -> None:
    """Give memory of the host that was freed back to the system. glibc keeps what is below something that stays;
    without glibc nothing is done."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # malloc_trim(3)
    if trim is not None:
        trim(0)
