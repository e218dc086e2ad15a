"""What neighbouring stages of a pipeline send to each other: hidden states forwards, their gradients backwards."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from toolkit.model.stages import Stage
from toolkit.model.tensor import group_of
from toolkit.recipe.mesh import Action
from toolkit.recipe.resolve import Resolved

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of hidden states, by the number that is sent for each."""


class Link:
    """The neighbours of one process in its pipeline. Every process makes one, at the same time.

    Sends do not wait for their receiver. Hidden states and gradients have groups of their own: NCCL runs the sends and
    receives of one group between two ranks in the order in which each rank calls them, and a stage sends ahead to the
    next one while it waits for what that stage sends back.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        self.device = device
        self.ranks = resolved.mesh.stage_ranks(dist.get_rank())
        index = resolved.mesh.stage(dist.get_rank())
        self.before = self.ranks[index - 1] if index else None
        self.after = self.ranks[index + 1] if index + 1 < len(self.ranks) else None
        stage_ranks = resolved.mesh.stage_ranks
        self.group = group_of(resolved, stage_ranks)
        self._forwards = group_of(resolved, stage_ranks, "hidden states")
        self._backwards = group_of(resolved, stage_ranks, "gradients")
        self._hidden: deque[tuple[Any, torch.Tensor]] = deque()
        self._gradients: deque[tuple[Any, torch.Tensor]] = deque()
        """What was sent and may not have been received, oldest first."""
        self._dtype: torch.dtype | None = None
        self._reported = False
        self.counts: Counter[str] = Counter()
        """Tensors sent and received, by what they are."""

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the stage after this one; the first time their dtype too."""
        if not self._reported:
            number = torch.tensor([_DTYPES.index(hidden.dtype)], device=self.device)
            _send(number, self.after, self._forwards)[0].wait()
            self._reported = True
        # An evaluation has no backward that would hold back the first stages: they may be this far ahead.
        while len(self._hidden) > 2 * len(self.ranks):
            self._hidden.popleft()[0].wait()
        self._hidden.append(_send(hidden, self.after, self._forwards))
        self.counts["hidden states sent"] += 1

    def receive_hidden(self, shape: torch.Size) -> torch.Tensor:
        """Hidden states of ``shape`` from the stage before this one."""
        if self._dtype is None:
            number = torch.empty(1, dtype=torch.int64, device=self.device)
            _receive(number, self.before, self._forwards)
            self._dtype = _DTYPES[int(number.item())]
        hidden = torch.empty(shape, dtype=self._dtype, device=self.device)
        _receive(hidden, self.before, self._forwards)
        self.counts["hidden states received"] += 1
        return hidden

    def send_gradient(self, gradient: torch.Tensor) -> None:
        """Send the gradient of hidden states to the stage that they came from, when the one before has arrived there,
        which is kept until then."""
        while self._gradients:
            self._gradients.popleft()[0].wait()
        self._gradients.append(_send(gradient, self.before, self._backwards))
        self.counts["gradients sent"] += 1

    def receive_gradient(self, hidden: torch.Tensor) -> torch.Tensor:
        """The gradient of ``hidden`` from the stage that it was sent to."""
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        _receive(gradient, self.after, self._backwards)
        self._hidden.popleft()[0].wait()  # gradients come in the order of hidden states, which have then arrived
        self.counts["gradients received"] += 1
        return gradient

    def settle(self) -> None:
        """Wait until all that was sent has been received."""
        for sent in (self._hidden, self._gradients):
            while sent:
                sent.popleft()[0].wait()


def _send(tensor: torch.Tensor, to: int | None, group: Any) -> tuple[Any, torch.Tensor]:
    """The work of sending, and what has to be kept until it is done."""
    assert to is not None
    tensor = tensor.detach().contiguous()
    return dist.isend(tensor, to, group=group), tensor


def _receive(into: torch.Tensor, source: int | None, group: Any) -> None:
    assert source is not None
    work = dist.irecv(into, source, group=group)
    assert work is not None
    work.wait()


@dataclass
class Pipeline:
    """This process's stage, its neighbours, and what it has done in the last window, in order."""

    stage: Stage
    link: Link
    actions: list[Action] = field(default_factory=list)

    def of_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The last stage's value of ``tensor``, on every stage."""
        self.link.settle()
        dist.broadcast(tensor, self.link.ranks[-1], group=self.link.group)
        return tensor
