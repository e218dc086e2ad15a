"""Ranks without a launcher, forked from a process that has the packages loaded already: a start costs a second.

The ranks run ``toolkit.train`` itself, in processes of their own; only what starts them is another."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PRELOADED = [
    "toolkit.training.rank",
    "toolkit.training.run",
    "deepspeed",
    "peft",
    "transformers.models.llama.modeling_llama",
]


def start_ranks(arguments: list[str], cwd: Path, size: int, **environment: str) -> list[ForkServerProcess]:
    """One process per rank, begun; standard error of each goes to ``cwd/rankN.err``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        given = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        if size == 1:
            given = {"OMP_NUM_THREADS": 1}
        variables = {key: str(value) for key, value in given.items()} | environment
        process = context.Process(target=_rank, args=(arguments, str(cwd), variables, rank))
        process.start()
        ranks.append(process)
    return ranks


def _rank(arguments: list[str], cwd: str, environment: dict[str, str], rank: int) -> None:
    os.environ.update(environment)
    os.chdir(cwd)
    handle = os.open(f"rank{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 2)
    os.dup2(handle, 1)
    # Data workers as a launched rank has them. A fork server and its workers keep each other when the rank is killed.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    from toolkit.training.rank import main

    torch.set_num_threads(1)
    sys.exit(main(arguments))


def kill(ranks: list[ForkServerProcess]) -> None:
    """SIGKILL, at one moment as far as that goes."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join(30)


def finish(ranks: list[ForkServerProcess], seconds: float = 120.0) -> list[int | None]:
    """Wait for all; returns the exit codes."""
    for process in ranks:
        process.join(seconds)
    codes = [process.exitcode for process in ranks]
    kill([process for process in ranks if process.is_alive()])
    return codes
