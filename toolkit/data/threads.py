"""Tokenise on several threads: `tokenizers` releases the GIL while it encodes."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from toolkit.machine import cpu_count

T = TypeVar("T")
R = TypeVar("R")

_CHUNK = 16
"""Items per task, so that scheduling costs little beside the work."""
_MAX_THREADS = 8
"""More threads mostly wait for the GIL."""

_Outcome = tuple[list[R], Exception | None]
"""Results of a task up to its first error, and that error."""


def thread_count(alone: bool) -> int:
    """Number of tokenising threads: this process's share of the node's cores. ``alone``: the node's other processes
    are waiting for this one, so it takes all."""
    processes = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MAX_THREADS, cpu_count() // processes))


def ordered_map(function: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R, None, None]:
    """Like ``map``, computed by ``threads`` threads ahead of the consumer, in the order of ``items``.

    An exception of ``function`` or ``items`` is raised after the results of all earlier items. The first item runs in
    the calling thread, so that lazy initialisation has finished before other threads start.
    """
    source = iter(items)
    yield from map(function, itertools.islice(source, 1))
    if threads < 2:
        yield from map(function, source)
        return
    pool, running = ThreadPoolExecutor(threads, thread_name_prefix="tokenise"), deque[Future[_Outcome[R]]]()
    try:
        reading, failed = True, None
        while reading or running:
            while reading and len(running) <= 2 * threads:
                chunk: list[T] = []
                try:
                    for item in itertools.islice(source, _CHUNK):
                        chunk.append(item)
                except Exception as error:
                    failed = error
                reading = failed is None and len(chunk) == _CHUNK
                if chunk:
                    running.append(pool.submit(_run, function, chunk))
            if running:
                results, raised = running.popleft().result()
                yield from results
                if raised is not None:
                    raise raised
        if failed is not None:
            raise failed
    finally:
        pool.shutdown(cancel_futures=True)


def _run(function: Callable[[T], R], chunk: list[T]) -> _Outcome[R]:
    results: list[R] = []
    for item in chunk:
        try:
            results.append(function(item))
        except Exception as error:
            return results, error
    return results, None
