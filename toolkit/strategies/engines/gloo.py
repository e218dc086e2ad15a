"""One thread per gloo group, because two break the heap."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist


def one_thread() -> None:
    """Have every gloo group of this process, made from now on, run its collectives on one thread.

    torch 2.13.0 gives a group two. Each writes the name of what it has just finished into one string of the group's,
    without a lock (``ProcessGroupGloo::runLoop``, ``pgStatus_->lastCompletedWorkName``). Names of more than 15
    characters are on the heap, ALLGATHER_COALESCED for one, which is every all-gather of a DTensor: sooner or later
    both threads free the same memory, and the process dies of signal 6 or 11, or hangs, somewhere else. What the ranks
    start in one order one thread does in that order, so none waits for another for ever.
    """
    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    create = group.__init__
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def created(self: Any, store: Any, rank: int, size: int, options: Any = None, **given: Any) -> None:
        if options is None and "timeout" in given:  # as torch makes every group; whoever names options keeps them
            options = group._Options()
            options._timeout, options._threads, options._devices = given.pop("timeout"), 1, _devices(group)
        create(self, store, rank, size, *([] if options is None else [options]), **given)

    group.__init__ = created


def _devices(group: Any) -> list[Any]:
    """The network interfaces that torch takes where a group is made without options."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [group.create_default_device()]
    return [group.create_device(interface=name) for name in names.split(",")]
