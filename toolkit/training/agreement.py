"""What the ranks tell each other around a checkpoint: which of them failed, and whether they share a disk."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.errors import RunFailed
from toolkit.training.finding import all_checkpoints
from toolkit.training.loop import sum_over_ranks
from toolkit.training.manifest import MANIFEST

if TYPE_CHECKING:
    from toolkit.training.session import Session

_POLL_S = 0.02
_SEEN_S = 10.0
"""How long a file of rank 0 may take to appear on another node of shared storage. It was there before the others look,
and nobody looked for its name before, so a network file system has no older answer to give. Where one takes longer,
rank 0 writes alone: slower, and right."""


def first_problem(session: Session, problem: str | None) -> tuple[int, str] | None:
    """The lowest rank that has a problem, and the problem; None if no rank has one. Every rank calls it."""
    rank, world = session.accelerator.process_index, session.accelerator.num_processes
    flags = [float(other == rank and problem is not None) for other in range(world)]
    summed = sum_over_ranks(torch.tensor(flags, device=session.engine.device)).tolist()
    failing = next((other for other, flag in enumerate(summed) if flag), None)
    return None if failing is None else (failing, str(from_rank(session, failing, problem)))


def from_rank(session: Session, rank: int, value: Any) -> Any:
    """What ``rank`` gives as ``value``, a small object; every rank calls it."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=rank, device=session.engine.device)
    return values[0]


def name_of_mark(session: Session) -> str:
    """The name of a file that did not exist before, the same on every rank; every rank calls it."""
    return str(from_rank(session, 0, f".seen-{uuid.uuid4().hex}"))


def every_rank_sees(session: Session, mark: Path) -> bool:
    """Whether every process sees the file that rank 0 has made; every rank calls it."""
    until = time.monotonic() + _SEEN_S
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return first_problem(session, None if seen else "not seen") is None


_CURES = {errno.EACCES: "Make the folder writable", errno.EROFS: "Make the folder writable",
          errno.ENOSPC: "Free disk space", errno.EDQUOT: "Free disk space", errno.EFBIG: "Free disk space"}  # fmt: skip


def all_written(session: Session, problem: str | None, target: Path, give_up: Callable[[], Any]) -> None:
    """Wait for every rank; if one could not write, all ``give_up``, and RunFailed is raised on each."""
    found = first_problem(session, problem)
    if found is None:
        return
    give_up()
    rank, why = found
    message = None
    if session.accelerator.is_main_process:
        where = f"rank {rank}: " if rank else ""
        cure = next((cure for code, cure in _CURES.items() if os.strerror(code) in why), "")
        then = f"{cure}, then resume" if cure else "Resume"
        message = f"{target}: cannot be written: {where}{why}; {_kept_before(target)}. {then} with --resume"
    raise RunFailed(str(from_rank(session, 0, message)))


def _kept_before(target: Path) -> str:
    """Describe the earlier checkpoints. Never raises: the other ranks wait for rank 0's message."""
    try:
        whole = [path for path in all_checkpoints(target.parent) if (path / MANIFEST).exists()]
    except OSError:
        return "the other checkpoints cannot be read"
    return f"the latest checkpoint is {whole[-1]} (intact)" if whole else "there is no earlier checkpoint"
