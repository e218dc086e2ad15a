"""Micro-batches on the device: the next one is copied there while this one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from toolkit.data.collate import MicroBatch

Fed = tuple[list[MicroBatch], Iterator[MicroBatch]]
"""A window as it was read, and its micro-batches on the device, to be gone through once."""


def feed(windows: Iterable[list[MicroBatch]], device: torch.device) -> Iterator[Fed]:
    """``windows`` in their order. A CPU has the micro-batches where they are: nothing is read ahead for one."""
    if device.type == "cuda":
        yield from Ahead(windows, Copies(device))
        return
    for window in windows:
        yield window, (micro.to(device) for micro in window)


class Copier(Protocol):
    """Begins a copy, and gives it to the arithmetic that comes after."""

    def begin(self, micro: MicroBatch) -> MicroBatch: ...

    def arrive(self, micro: MicroBatch) -> MicroBatch: ...


class Copies:
    """From pinned memory to a GPU on a stream beside the arithmetic's; the host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def begin(self, micro: MicroBatch) -> MicroBatch:
        with torch.cuda.stream(self.stream):
            return micro.to(self.device)

    def arrive(self, micro: MicroBatch) -> MicroBatch:
        arithmetic = torch.cuda.current_stream(self.device)
        arithmetic.wait_stream(self.stream)
        for tensor in micro.tensors.values():
            tensor.record_stream(arithmetic)  # its memory is the copies' again only when the arithmetic has read it
        return micro


class Ahead:
    """Reads and begins to copy a micro-batch when the arithmetic of the one before it is queued: so one that is not
    yet used is on the device, never two. The last one of a window is followed by the next window's first, read before
    the optimizer step and whatever waits for it; data that cannot be read is told when its own turn comes."""

    def __init__(self, windows: Iterable[list[MicroBatch]], copies: Copier) -> None:
        self._windows, self._copies = iter(windows), copies
        self._window: list[MicroBatch] | None = None
        self._coming: MicroBatch | None = None
        self._failed: Exception | None = None

    def __iter__(self) -> Iterator[Fed]:
        self._begin(self._read())
        while self._window is not None:
            yield self._window, self._through(self._window)
        if self._failed is not None:
            raise self._failed

    def _through(self, window: list[MicroBatch]) -> Iterator[MicroBatch]:
        for at in range(len(window)):
            assert self._coming is not None
            yield self._copies.arrive(self._coming)
            self._begin(window[at + 1] if at + 1 < len(window) else self._read())

    def _begin(self, micro: MicroBatch | None) -> None:
        self._coming = None if micro is None else self._copies.begin(micro)

    def _read(self) -> MicroBatch | None:
        try:
            self._window = next(self._windows, None)
        except Exception as error:
            self._window, self._failed = None, error
        return self._window[0] if self._window else None
