"""``torch.cuda`` without a GPU: a host with eight of them, whose streams are always done and whose memory is empty.

Only Python's half is here (``shim.cpp`` is the other). Calls that make a host wait for its device are handed to
``waited``; what is set for a device is kept, to be asked for.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MEMORY = 80 * 2**30
COUNT = 8
PROPERTIES = SimpleNamespace(
    name="Rehearsed H100", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, gcnArchName="",
    warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, is_integrated=False,
)  # fmt: skip

waited: Callable[[str], None] = print
"""Called with the name of each call that makes the host wait."""
memory_fractions: list[tuple[int, float]] = []
"""Device and share of each ``set_per_process_memory_fraction``, in order."""

_shim: ctypes.CDLL
_pinned: set[StorageWeakRef] = set()


def current() -> int:
    return int(_shim.rehearsal_current())


def set_current(device: Any) -> None:
    if (index := _index(device)) is not None:
        _shim.rehearsal_set_current(index)


def _index(device: Any) -> int | None:
    return device if isinstance(device, int) else torch.device(device).index


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor of the host is in page-locked memory."""
    return StorageWeakRef(tensor.untyped_storage()) in _pinned


class Stream:
    """A stream, or the current one. Nothing is ever queued."""

    cuda_stream = stream_id = 0
    device_type = 1

    def __init__(self, device: Any = None, *args: Any, **kwargs: Any) -> None:
        index = None if device is None else _index(device)
        self.device_index = current() if index is None else index
        self.device = torch.device("cuda", self.device_index)

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waited("Stream.synchronize")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        waited("Event.synchronize")


class CurrentDevice:
    """``torch.cuda.device``: another device is the current one inside."""

    def __init__(self, device: Any) -> None:
        self._device, self._before = device, 0

    def __enter__(self) -> None:
        self._before = current()
        if self._device is not None:
            set_current(self._device)

    def __exit__(self, *_: object) -> None:
        set_current(self._before)


def _set_fraction(fraction: float, device: Any = None) -> None:
    index = None if device is None else _index(device)
    memory_fractions.append((current() if index is None else index, fraction))


@contextlib.contextmanager
def _in_stream(stream: Any) -> Iterator[None]:
    yield


def _waits(name: str) -> Callable[..., None]:
    return lambda *args, **kwargs: waited(name)


def _says(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def install(shim: ctypes.CDLL) -> None:
    """Put all of it in torch's place, for the rest of this process."""
    global _shim
    _shim = shim
    nothing, zero, here = _says(None), _says(0), lambda *args: Stream(*args)
    generator_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)  # noqa: E731
    of_cuda = {
        "is_available": _says(True), "_is_compiled": _says(True), "is_initialized": _says(True), "init": nothing,
        "_lazy_init": nothing, "_is_in_bad_fork": _says(False), "device_count": _says(COUNT),
        "current_device": current, "set_device": set_current, "device": CurrentDevice,
        "get_device_capability": _says((9, 0)), "get_device_name": _says(PROPERTIES.name),
        "get_device_properties": _says(PROPERTIES), "is_bf16_supported": _says(True),
        "Stream": Stream, "Event": Event, "current_stream": here, "default_stream": here, "stream": _in_stream,
        "set_stream": nothing, "current_blas_handle": zero, "is_current_stream_capturing": _says(False),
        "synchronize": _waits("synchronize"), "empty_cache": _waits("empty_cache"), "ipc_collect": nothing,
        "manual_seed": nothing, "manual_seed_all": nothing, "seed_all": nothing,
        "get_rng_state": generator_state, "set_rng_state": nothing, "get_rng_state_all": _says([]),
        "memory_allocated": zero, "max_memory_allocated": zero, "memory_reserved": zero, "max_memory_reserved": zero,
        "reset_peak_memory_stats": nothing, "reset_max_memory_allocated": nothing,
        "memory_stats": lambda device=None: collections.defaultdict(int), "mem_get_info": _says((MEMORY, MEMORY)),
        "set_per_process_memory_fraction": _set_fraction,
    }  # fmt: skip
    of_accelerator = {
        "is_available": _says(True), "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        "device_count": _says(COUNT), "current_device_index": current, "set_device_index": set_current,
        "current_stream": here, "synchronize": _waits("synchronize"), "empty_cache": _waits("empty_cache"),
    }  # fmt: skip
    for owner, replaced in ((torch.cuda, of_cuda), (torch.accelerator, of_accelerator)):
        for name, value in replaced.items():
            setattr(owner, name, value)
    torch._C._cuda_getCurrentRawStream = zero  # type: ignore[attr-defined]  # bitsandbytes takes it at its import
    torch.Stream, torch.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = zero  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    _pin_by_note()


def _pin_by_note() -> None:
    """Page-locked memory as a note about a storage: whether a copy waits depends on it."""

    def note(tensor: torch.Tensor) -> torch.Tensor:
        for old in [storage for storage in _pinned if storage.expired()]:
            _pinned.discard(old)
        _pinned.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    empty = torch.empty

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return note(made) if pin_memory else made

    torch.empty = empty_or_pinned
    torch.utils._device._device_constructors().add(empty)  # else ``torch.device`` as a context does not reach it
    torch.Tensor.pin_memory = lambda self, *args: note(self.clone())  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda self, *args: is_pinned(self)  # type: ignore[method-assign, assignment]
