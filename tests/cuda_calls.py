"""Stand-ins for the functions of torch.cuda that are asked before any tensor is on a GPU, and what was asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

GPUS = 2
BYTES = 80 * 2**30


class CudaCalls:
    """``seen``: the calls that chose a device, made a process group or limited memory, in their order."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.current = 0
        self.made = 0

    def set_device(self, device: Any) -> None:
        self.current = _index(device, self.current)
        self.seen.append(("set_device", self.current))

    def has_made(self) -> bool:
        return self.made > 0

    def limit(self, fraction: float, device: Any = None) -> None:
        self.seen.append(("limit", _index(device, self.current), round(fraction, 6)))

    @contextlib.contextmanager
    def standing_in(self, connected: bool = True) -> Iterator[CudaCalls]:
        """``connected`` False: no process group seems to be there until one is made."""

        def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            self.seen.append(("init", str(backend), kwargs.get("timeout")))
            self.made += 1

        cuda = {
            "is_available": lambda: True,
            "device_count": lambda: GPUS,
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "get_device_properties": lambda device=None: mock.Mock(total_memory=BYTES),
            "set_per_process_memory_fraction": self.limit,
            "reset_peak_memory_stats": lambda device=None: None,
            "max_memory_allocated": lambda device=None: 1,
            "max_memory_reserved": lambda device=None: 2,
            "empty_cache": lambda: None,
        }
        with contextlib.ExitStack() as stack:
            for name, call in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, call))
            stack.enter_context(mock.patch.object(dist, "init_process_group", init))
            if not connected:
                stack.enter_context(mock.patch.object(dist, "is_initialized", self.has_made))
            yield self


def _index(device: Any, current: int) -> int:
    if device is None:
        return current
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0
