"""What the evidence was measured on, and where it is written."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.machine import cuda_device_count

MEASUREMENTS = Path("docs/measurements")
"""Only results of a GPU are written here; results of a CPU have it in their name."""

NO_GPU = (
    "no NVIDIA GPU was found here, and evidence from a GPU is measured on one; "
    "`--device cpu --tiny --out DIR` tries the parts out without"
)


@dataclass(frozen=True)
class Device:
    """``type``: cuda or cpu. ``memory_bytes``, ``capability``, ``cuda``, ``nccl``: None on a CPU."""

    type: str
    name: str
    memory_bytes: int | None = None
    capability: str | None = None
    cuda: str | None = None
    nccl: str | None = None

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def this_device(kind: str | None) -> Device:
    """The device to measure on; ``kind`` is cuda, cpu or None for the GPU that is here. Raises InputError."""
    if kind == "cpu":
        return Device("cpu", "cpu")
    if not cuda_device_count():
        raise InputError(NO_GPU)
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"the driver sees a GPU, and torch {torch.__version__} does not: it is a build without CUDA")
    properties = torch.cuda.get_device_properties(0)
    return Device(
        "cuda",
        properties.name,
        properties.total_memory,
        f"{properties.major}.{properties.minor}",
        torch.version.cuda,
        ".".join(map(str, torch.cuda.nccl.version())),
    )


def default_folder(device: Device) -> Path:
    """docs/measurements/<gpu>-<date>."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-").removeprefix("nvidia-")
    return MEASUREMENTS / f"{name}-{time.strftime('%Y-%m-%d')}"


def check_folder(device: Device, folder: Path) -> None:
    """Raise InputError if figures of a CPU would be mixed with those of GPUs."""
    inside = folder.resolve().is_relative_to(MEASUREMENTS.resolve())
    if inside and not device.is_gpu:
        raise InputError(f"--out {folder}: {MEASUREMENTS} accepts only results of a GPU, but this runs on a CPU")


def host_bytes_available() -> int:
    """Memory of the host that a process may still take (Linux's MemAvailable)."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo names no MemAvailable")
