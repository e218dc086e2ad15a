"""What a checkpointed block keeps for its backward (its input), moved to host memory until then.

The copies run beside the arithmetic, on a stream of their own: out when a block has begun, back while the block behind
it is at its backward. Host memory is pinned and comes from torch's own caching allocator, which gives none away that a
copy still needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


class Mover:
    """Copies between a GPU and pinned host memory on a stream of its own.

    Device memory belongs to the stream of the arithmetic throughout, which waits for each copy before what it reads or
    writes is given away: so the allocator can use it again in order, however far the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._leaving: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host copy, on its way. The copy before it is waited for now, after a whole block's arithmetic."""
        self.settle()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            self._leaving = tensor, self.stream.record_event()
        return host

    def back(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, on its way; it begins when the arithmetic queued by now has ended."""
        there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            there.copy_(host, non_blocking=True)
        return there

    def settle(self) -> None:
        """Let the arithmetic wait for the copies so far."""
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._leaving = None


@dataclass
class _Moved:
    host: torch.Tensor
    place: int
    ahead: torch.Tensor | None = None


@dataclass
class HostStore:
    """Saved tensors that wait in host memory; one for all blocks, so that a backward can send for the next.

    ``mover``: makes what copies, at the first tensor; tests give one that counts.
    """

    mover: Callable[[torch.device], Any] = Mover
    moved: int = 0
    """Tensors that went to the host, and came back."""
    returned: int = 0
    bytes_out: int = 0
    waiting: dict[int, _Moved] = field(default_factory=dict)
    _mover: Any = None
    _next: int = 0

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, tensors saved for the backward go to the host."""
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
        """Its graph is gone."""
        self.waiting.pop(one.place, None)


def _large(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


class _Ticket:
    """What autograd holds in place of the tensor; dies with the graph."""

    def __init__(self, store: HostStore, one: _Moved) -> None:
        self.store, self.one = store, one

    def __del__(self) -> None:
        self.store.forget(self.one)
