"""Rehearsals run in processes of their own, one for each local rank, each one after another: as in a job, a process has
one device for all its life, which torch remembers here and there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from rehearsal import shim, worker
from rehearsal.cells import Call

_LIMIT_S = 800
"""Of a machine that does much else; none takes more than a minute of an idle one."""


class Stage:
    """Hands calls to the processes, those of all tests at once, so that no process waits for a test."""

    def __init__(self, root: str, calls: list[Call]) -> None:
        self._root = root
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._coming: dict[Call, Future[Any]] = {}
        for call in sorted(dict.fromkeys(calls), key=lambda call: not call.long):
            self._begin(call)

    def _begin(self, call: Call) -> Future[Any]:
        if call not in self._coming:
            rank = call.process()
            if rank not in self._pools:
                self._pools[rank] = ProcessPoolExecutor(1, get_context("spawn"), worker.start)
            self._coming[call] = self._pools[rank].submit(worker.make, call, self._root)
        return self._coming[call]

    def __call__(self, call: Call) -> Any:
        """What the call returns; raises what it raises."""
        return self._begin(call).result(_LIMIT_S)

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest, tiny_root: Path, launches: None) -> Iterator[Stage]:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA, and has the hooks that tests/rehearsal/shim.cpp stands in for")
    if shim.compiler() is None:
        pytest.skip("no C++ compiler: the rehearsal's CUDA hooks are compiled (tests/rehearsal/shim.cpp)")
    shim.build()
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    calls = [value for values in params for value in values.values() if isinstance(value, Call)]
    stage = Stage(str(tiny_root), calls)
    try:
        yield stage
    finally:
        stage.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They may wait for each other's processes."""
    for item in items:
        if "stage" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_LIMIT_S + 20))
            item.add_marker(pytest.mark.xdist_group("rehearsal"))  # one stage makes what all of them ask
