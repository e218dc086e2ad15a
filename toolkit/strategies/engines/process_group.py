"""Create the process group and select this process's device in the same way for every strategy, before accelerate or
DeepSpeed do so in different ways. Both use an existing group (accelerate 1.15.0, DeepSpeed 0.19.8)."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from toolkit.upstream.torch import allow, use_one_gloo_thread

_BACKENDS = {"cuda": "cuda:nccl,cpu:gloo", "cpu": "gloo"}
"""On GPUs gloo is there too: what is offloaded, gradients for example, is reduced on the host. A group serves many jobs
under `verify` and `bench`, so it does not depend on whether the first of them offloads."""
_CONNECTING = timedelta(minutes=30)
"""Timeout until training starts: NCCL that cannot reach its peers hangs in the first collective, and nothing else
detects it."""
_TRAINING = timedelta(hours=12)
"""From then on `training/watch.py` finds the rank that hangs, by `run.hang_after`. torch's limits (10 minutes for NCCL,
30 for gloo) would end ranks that rightly wait while rank 0 writes and hashes a large checkpoint: 840 GB (70B, float32
with moments) take 2.3 hours at 100 MB/s."""


def take_device(kind: str) -> torch.device:
    """This process's own device, of ``kind`` (``cuda`` or ``cpu``), the one that accelerate chooses; a GPU is the
    current one from then on. Before that everything that names no device, NCCL too, is on GPU 0 for every rank."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def connect(kind: str) -> None:
    """Select this process's device and create the process group, unless there is one."""
    take_device(kind)
    use_one_gloo_thread()
    if not dist.is_initialized():
        dist.init_process_group(_BACKENDS[kind], timeout=_CONNECTING)


def allow_hours() -> None:
    """Let ranks wait for one another for hours, in every group there is. DeepSpeed and device meshes make groups of
    their own, which torch 2.13.0 gives its default limit whatever the first group's is; so call it once they are made.
    """
    if dist.is_initialized():
        allow(_TRAINING)
