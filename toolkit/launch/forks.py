"""Ranks that start as forks of one process, which imports the packages meanwhile: each import of torch, transformers
and DeepSpeed takes 6 to 10 seconds of processor time, and a command that starts four ranks on two cores waits for all.

For commands that start groups of their own and leave nothing in the process but those: `toolkit verify`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver

from toolkit.launch.group import WorkerGroup
from toolkit.machine import cuda_device_count
from toolkit.recipe.schema import Recipe
from toolkit.strategies import strategy_named

_IMPORTS = "TOOLKIT_FORK_IMPORTS"
_JOB = "toolkit.verification.record.worker"


def begin_imports(recipe: Recipe) -> None:
    """Start the process that imports what a recipe's ranks need, and have groups start their ranks there. Without a
    GPU alone: a process whose driver was asked for one cannot be forked. Elsewhere, and where there is no room for its
    socket (a TMPDIR whose name is too long, a full disk), each rank imports by itself."""
    if sys.platform != "linux" or cuda_device_count():
        return
    packages = ["torch", "transformers", "accelerate"]
    packages += ["peft"] if recipe.adapter is not None else []
    packages += ["deepspeed"] if strategy_named(recipe.strategy.name).distributed_type == "DEEPSPEED" else []
    with _variable(_IMPORTS, " ".join([*packages, _JOB])):
        multiprocessing.set_forkserver_preload([__name__])
        try:
            forkserver.ensure_running()
        except OSError:
            return
    WorkerGroup.start_method = "forkserver"


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _import_all(packages: Sequence[str]) -> None:
    """In the process that is forked. What an import prints is for the ranks' log, which is not open yet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1), os.dup(2)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        for package in packages:
            with contextlib.suppress(Exception):  # each rank imports it again, and says what is wrong
                importlib.import_module(package)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for target, before in enumerate(kept, 1):
            os.dup2(before, target)
            os.close(before)
        os.close(nowhere)


if _asked := os.environ.get(_IMPORTS):
    del os.environ[_IMPORTS]
    _import_all(_asked.split())
