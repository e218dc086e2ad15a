"""Tokenising on several threads: the work is done outside Python's lock, in `tokenizers`."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from toolkit.machine import cpu_count

T = TypeVar("T")
R = TypeVar("R")

_CHUNK = 16
"""Items of a task: of fewer, handing them over takes as long as their work."""
_MOST = 8
"""Threads: of more, those that hold Python's lock are waited for."""


_Done = tuple[list[R], Exception | None]


def thread_count(alone: bool) -> int:
    """How many threads a process may take: a core each. ``alone``: the other processes of this node wait for it."""
    processes = 1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST, cpu_count() // processes))


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """``function`` of each item, in order, made by ``threads`` threads a little ahead of what is taken.

    What ``function`` or ``items`` raises is raised in its turn, after the results of the items before it; none behind
    it is begun. The first item is done in the calling thread: what is made once is then there.
    """
    source = iter(items)
    yield from map(function, itertools.islice(source, 1))
    if threads < 2:
        yield from map(function, source)
        return
    pool, running = ThreadPoolExecutor(threads, thread_name_prefix="tokenise"), deque[Future[_Done[R]]]()
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


def _run(function: Callable[[T], R], chunk: list[T]) -> _Done[R]:
    results: list[R] = []
    for item in chunk:
        try:
            results.append(function(item))
        except Exception as error:
            return results, error
    return results, None
