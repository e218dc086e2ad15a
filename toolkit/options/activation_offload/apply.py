"""Moves the input of each checkpointed block to host memory until its backward.

Copies overlap with compute on their own stream: out after a block has started, back while the next block runs its
backward. Host memory is pinned and comes from torch's caching allocator, which does not reuse memory that a copy still
needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


class Mover:
    """Copies between a GPU and pinned host memory on its own stream.

    Device memory always belongs to the compute stream, which waits for each copy before it reuses the source or reads
    the result. So the allocator can reuse it in order, however far the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._leaving: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to the host. Waits for the previous copy, after the compute of a whole block."""
        self.settle()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            self._leaving = tensor, self.stream.record_event()
        return host

    def back(self, host: torch.Tensor) -> torch.Tensor:
        """Start a copy to the GPU, after the compute that is queued now."""
        there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            there.copy_(host, non_blocking=True)
        return there

    def settle(self) -> None:
        """Make the compute stream wait for all copies so far."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._leaving = None


@dataclass
class _Moved:
    host: torch.Tensor
    place: int
    ahead: torch.Tensor | None = None


@dataclass
class HostStore:
    """Saved tensors in host memory; one store for all blocks, so that a backward can prefetch the next. ``mover``:
    creates the copier at the first tensor; tests pass one that counts."""

    mover: Callable[[torch.device], Any] = Mover
    moved: int = 0
    """Number of tensors copied to the host, and back."""
    returned: int = 0
    bytes_out: int = 0
    waiting: dict[int, _Moved] = field(default_factory=dict)
    _mover: Any = None
    _next: int = 0

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Context in which tensors saved for the backward move to the host."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._mover is None and (self.mover is not Mover or tensor.device.type == "cuda"):
            self._mover = self.mover(tensor.device)
        # A weight is where it is anyway; positions and masks are small.
        if self._mover is None or isinstance(tensor, torch.nn.Parameter) or not _large(tensor):
            return tensor
        one = _Moved(self._mover.out(tensor.detach()), self._next)
        self.waiting[self._next] = one
        self._next += 1
        self.moved += 1
        self.bytes_out += tensor.nbytes
        return _Ticket(self, one)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Ticket):
            return packed
        one = packed.one
        # Asked for a second time (retain_graph), it is fetched a second time.
        there = self._mover.back(one.host) if one.ahead is None else one.ahead
        one.ahead = None
        self._mover.settle()
        before = self.waiting.get(one.place - 1)
        if before is not None and before.ahead is None:
            before.ahead = self._mover.back(before.host)
        self.returned += 1
        return there

    def forget(self, one: _Moved) -> None:
        """The graph was freed."""
        self.waiting.pop(one.place, None)


def _large(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


class _Ticket:
    """The placeholder that autograd holds for the tensor; freed with the graph."""

    def __init__(self, store: HostStore, one: _Moved) -> None:
        self.store, self.one = store, one

    def __del__(self) -> None:
        self.store.forget(self.one)
