"""Micro-batches on the device: the next one is copied there while this one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from toolkit.data.collate import MicroBatch

Fed = tuple[list[MicroBatch], Iterator[MicroBatch]]
"""A window, and an iterator over its micro-batches on the device, for one pass."""


def feed(windows: Iterable[list[MicroBatch]], device: torch.device) -> Iterator[Fed]:
    """``windows`` in order. On a CPU micro-batches are used where they are: nothing is prefetched."""
    if device.type == "cuda":
        yield from Ahead(windows, Copies(device))
        return
    for window in windows:
        yield window, (micro.to(device) for micro in window)


class Copier(Protocol):
    """Starts a copy, and makes later kernels wait for it."""

    def begin(self, micro: MicroBatch) -> MicroBatch: ...

    def arrive(self, micro: MicroBatch) -> MicroBatch: ...


class Copies:
    """From pinned memory to a GPU on a separate stream; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def begin(self, micro: MicroBatch) -> MicroBatch:
        with torch.cuda.stream(self.stream):
            return micro.to(self.device)

    def arrive(self, micro: MicroBatch) -> MicroBatch:
        arithmetic = torch.cuda.current_stream(self.device)
        arithmetic.wait_stream(self.stream)
        for tensor in micro.every_tensor():
            tensor.record_stream(arithmetic)  # its memory is the copies' again only when the arithmetic has read it
        return micro


class Ahead:
    """Starts copying a micro-batch once the kernels of the previous one are queued, so at most one unused micro-batch
    is on the device.

    After the last one of a window comes the next window's first, read before the optimizer step and its
    synchronisation; an error in the data is raised at that data's own turn.
    """

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
