"""A process group that stays open for many jobs: starting one takes seconds, a small job much less. Used by `toolkit
verify` and the tests.

A job is a picklable function, called with its arguments on every rank.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunFailed
from toolkit.launch.host_memory import HostMemory


class JobFailed(RunFailed):
    """A rank raised, died or timed out. ``rank``: the first that did; the group has been stopped, unless every rank
    has answered.

    ``refused``: the exception, if it was an InputError (invalid input).
    """

    def __init__(self, rank: int | None, message: str, refused: InputError | None = None) -> None:
        super().__init__(message)
        self.rank, self.refused = rank, refused


_OTHERS_REFUSE = 3.0
"""Seconds in which the other ranks answer, once one has refused its input: one that does not waits in a collective."""


_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Parts of gloo's and NCCL's messages about a rank that has exited."""
_LOOK_S = 1.0
"""Seconds between two looks at the host's memory."""
_EXIT_TIMEOUT = 2.0
"""Seconds to wait for the exit of a process that has closed its connections."""


class WorkerGroup:
    """``size`` processes connected over gloo (or NCCL, if a job's recipe uses cuda), started on first use."""

    start_method = "spawn"
    """How processes start, in multiprocessing's words. A fork server that has imported the packages starts them in a
    fraction of the time, for a program that starts groups one after another."""

    def __init__(
        self, size: int, threads: int = 1, environment: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        """``log``: file for the output of the ranks, including warnings of the packages; None: this process's
        output."""
        self.size = size
        self.threads = threads
        self.environment = environment or {}
        self.log = log
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._waiting = False

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``job(*args)`` on every rank; returns the results by rank.

        Raises JobFailed with the first failing rank's traceback, or when ``timeout`` seconds have passed; the
        other ranks, which may wait in a collective forever, are ended with it.
        """
        self.begin(job, *args)
        return self.finish(timeout)

    def begin(self, job: Callable[..., Any], *args: Any) -> None:
        """Start ``job(*args)`` on every rank without waiting; `finish` must follow."""
        if self._waiting:  # interrupted: the answers to that job would be taken for those to this one
            self.close(patience=0.0)
        if not self._processes:
            self._start()
        self._waiting = True
        for pipe in self._pipes:
            pipe.send((job, args))

    def finish(self, timeout: float) -> list[Any]:
        """Wait for the job started by `begin`; returns its results by rank, and raises like `run`.

        What all ranks refuse (InputError), they refuse before or after their collectives: the group takes further jobs.
        """
        results: dict[int, Any] = {}
        refusal: JobFailed | None = None
        deadline, memory = time.monotonic() + timeout, HostMemory()
        while len(results) < self.size:
            memory.look()
            waited = {id(pipe): rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            open_pipes = [self._pipes[rank] for rank in waited.values()]
            left = max(0.0, deadline - time.monotonic())
            ready = [waited[id(pipe)] for pipe in wait(open_pipes, timeout=min(left, _LOOK_S))]
            if not ready and time.monotonic() < deadline:
                continue
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in results]
                self.close(patience=0.0)
                raise refusal or JobFailed(missing[0], f"no answer from rank {missing} after {timeout:.0f} s")
            for rank in ready:
                try:
                    ok, value = self._pipes[rank].recv()
                except (EOFError, ConnectionError):
                    died = self._died(rank, memory)
                    self.close(patience=0.0)
                    raise refusal or died from None
                if not ok:
                    report, refused = value
                    failed = JobFailed(rank, f"rank {rank}:\n{report}", refused)
                    if refused is None:
                        death = None if refusal else self._other_death(rank, report, memory)
                        self.close(patience=0.0)
                        raise refusal or death or failed
                    deadline = min(deadline, time.monotonic() + _OTHERS_REFUSE)
                    refusal = refusal or failed
                results[rank] = value
        self._waiting = False
        if refusal is not None:
            raise refusal
        return [results[rank] for rank in range(self.size)]

    def _died(self, rank: int, memory: HostMemory) -> JobFailed:
        process = self._processes[rank]
        process.join(5)  # its pipe closes before its exit code is known
        return JobFailed(rank, f"rank {rank} died (exit code {process.exitcode}){_signal(process.exitcode, memory)}")

    def _other_death(self, rank: int, report: str, memory: HostMemory) -> JobFailed | None:
        """The death of another rank, if ``rank`` reports a lost connection: the death is the cause, but may be
        noticed later."""
        if not any(mark in report for mark in _LOST_CONNECTION):
            return None
        others = {process.sentinel: other for other, process in enumerate(self._processes) if other != rank}
        ended = [others[one] for one in wait(list(others), timeout=_EXIT_TIMEOUT) if isinstance(one, int)]
        return self._died(ended[0], memory) if ended else None

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context: Any = multiprocessing.get_context(self.start_method)
        for rank in range(self.size):
            here, there = context.Pipe()
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(self.threads),
                "TOOLKIT_SHARED_GROUP": "1",
                **self.environment,
            }
            process = context.Process(target=_serve, args=(there, environment, self.log), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def close(self, *, patience: float = 5.0) -> None:
        """End this group's processes: they exit on request, or are killed after ``patience`` seconds."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join(10)
        self._processes, self._pipes, self._waiting = [], [], False

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _signal(code: int | None, memory: HostMemory) -> str:
    """The signal that ended a process, as the end of a message."""
    if code is None or code >= 0 or -code not in set(signal.Signals):
        return ""
    name = signal.Signals(-code).name
    return f": {name}{memory.told() if name == 'SIGKILL' else ''}"


def _serve(pipe: Connection, environment: dict[str, str], log: Path | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ.clear()  # a fork server has the variables of its own start
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None:
        # The caller's main module imports torch, and so did this process before the number of threads was set.
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    faulthandler.enable()  # a crash in C++ writes where in Python it was, to wherever stderr goes then
    # A loader in a job has processes of its own, which multiprocessing refuses whoever is marked a daemon. The parent
    # has its own mark, and ends this process with itself all the same; loaders' processes end with theirs.
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    imported = 0
    while True:
        try:
            job, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, job(*args))
        except BaseException as error:
            answer = (False, (traceback.format_exc(), error if isinstance(error, InputError) else None))
        del job, args
        gc.collect()
        if len(sys.modules) > imported:
            # What was imported stays: half a million objects that every later collection need not walk (DeepSpeed
            # collects several times for each engine).
            gc.freeze()
            imported = len(sys.modules)
        try:
            pipe.send(answer)
        except BrokenPipeError:  # the parent has given the group up
            return
