"""What the toolkit replaces in torch."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

from toolkit.upstream.replacement import Replacement


def use_one_gloo_thread() -> None:
    """Give every gloo group that this process creates from now on one worker thread instead of two, as long as this
    torch needs it.

    torch 2.13.0: both threads of a group assign to the same ``std::string`` without a lock
    (``ProcessGroupGloo::runLoop``, ``pgStatus_->lastCompletedWorkName``). Names longer than 15 characters are
    allocated on the heap; ``ALLGATHER_COALESCED``, every all-gather of a DTensor, is one. The double free ends the
    process with signal 6 or 11, or hangs it, at an unrelated place. Ranks start collectives in the same order, so one
    thread cannot deadlock. There is no public way: ``init_process_group`` takes options for NCCL alone.
    """
    if _two_threads_of_gloo():
        return
    group: Any = dist.ProcessGroupGloo
    create = group.__init__
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def created(self: Any, store: Any, rank: int, size: int, options: Any = None, **given: Any) -> None:
        if options is None and "timeout" in given:  # how torch creates groups; explicit options are kept
            options = group._Options()
            options._timeout, options._threads, options._devices = given.pop("timeout"), 1, _devices(group)
        create(self, store, rank, size, *([] if options is None else [options]), **given)

    group.__init__ = created


@functools.cache
def _devices(group: Any) -> list[Any]:
    """The network interfaces that torch uses for a group without options, the same ones for all groups. Each has a
    thread that wakes up 100 times a second, and torch 2.13.0 makes new ones for every group: a process with 200 groups
    took 12 % of a core while it waited, and takes 0.1 % now."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [group.create_default_device()]
    return [group.create_device(interface=name) for name in names.split(",")]


@functools.cache
def _two_threads_of_gloo() -> str:
    """Why threads are left alone, or "". The race is in torch's own library, where a process that tried it would die.
    torch 2.14.1, where it is gone, makes groups with other arguments, and takes no options."""
    if not dist.is_gloo_available():
        return "this torch has no gloo"
    form = dist.ProcessGroupGloo.__init__.__doc__ or ""
    if not hasattr(dist.ProcessGroupGloo, "_Options") or "options:" not in form or "enable_reconfigure" in form:
        return "this torch makes its groups otherwise, and gives their threads names of their own"
    return ""


REPLACEMENTS = (
    Replacement(
        "torch",
        "ProcessGroupGloo.__init__",
        "two threads of a group free the same memory",
        "2.11 to 2.13",
        _two_threads_of_gloo,
    ),
)
