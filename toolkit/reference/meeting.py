"""Forwards of several ranks in one process, which meet where the ranks exchange values."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Meeting:
    """Forwards of several ranks, one thread each, of which one runs at a time: from a place where they meet to the
    next, rank after rank. There the last to come computes for all. Each has a random state of its own."""

    def __init__(self, ranks: int) -> None:
        self._all = ranks
        self._turn, self._changed = 0, threading.Condition()
        self._waiting: dict[int, Any] = {}
        self._given: dict[int, Any] = {}
        self._problem: BaseException | None = None

    def run(self, forwards: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """The result of each; raises what the first of them raised."""
        results: dict[int, torch.Tensor] = {}
        threads_of_sums = torch.get_num_threads()  # torch adds up by threads, and a new thread would take all cores

        def one(rank: int) -> None:
            torch.set_num_threads(threads_of_sums)
            try:
                self._await(rank)
                results[rank] = forwards[rank]()
            except BaseException as error:
                self._problem = self._problem or error
            finally:
                self._pass_on(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self._all)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._problem is not None:
            raise self._problem
        return [results[rank] for rank in range(self._all)]

    def meet(self, rank: int, brought: Any, compute: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """What ``compute`` makes for this rank of what every rank has brought, once all are there."""
        self._waiting[rank] = brought
        if len(self._waiting) == self._all:
            there, self._waiting = [self._waiting[at] for at in range(self._all)], {}
            self._given = dict(enumerate(compute(there)))
        state = torch.get_rng_state()
        self._pass_on(rank)
        self._await(rank)
        torch.set_rng_state(state)
        return self._given.pop(rank)

    def _await(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self._problem is not None)
        if self._problem is not None:
            raise RuntimeError("another rank's forward failed")

    def _pass_on(self, rank: int) -> None:
        with self._changed:
            self._turn = (rank + 1) % self._all
            self._changed.notify_all()


def replicas(model: nn.Module, ranks: int) -> list[nn.Module]:
    """``model`` and copies of it that share the memory of its weights and buffers, each with gradients of its own."""
    found = [model]
    for _ in range(ranks - 1):
        shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
        for parameter in model.parameters():
            same = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            shared[id(parameter)] = same
        found.append(copy.deepcopy(model, shared))
    return found
