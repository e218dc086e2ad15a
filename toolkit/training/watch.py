"""Detects a rank that hangs, for which all others would wait in a collective: every rank publishes its progress and
watches the others."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from toolkit.model.compiling import compiling
from toolkit.upstream.torch import shared_store

_EVERY_S = 1.0
_ALL_ALIKE = 10
"""Multiple of the limit that applies if all ranks are at the same place: they may all run something long; only a rank
that is behind certainly hangs."""


@dataclass(frozen=True)
class Beat:
    """Progress of a rank. All ranks pass the same places in the same order, so the smallest count is behind."""

    count: int = 0
    step: int = 0
    place: str = "starting"
    untimed: bool = True


class Marks:
    """The current place of this rank; the loop sets it, the watch reads it."""

    def __init__(self) -> None:
        self.beat = Beat()

    def at(self, step: int, place: str, *, untimed: bool = False) -> None:
        """``untimed``: work that may take long while the others wait: saving, evaluation, startup."""
        self.beat = Beat(self.beat.count + 1, step, place, untimed)


def late(beats: Sequence[Beat], still_s: float, limit_s: float) -> str | None:
    """The ranks that are behind, if no rank made progress for ``still_s`` seconds; or None."""
    if any(beat.untimed for beat in beats):
        return None
    first, last = min(beat.count for beat in beats), max(beat.count for beat in beats)
    if first == last:
        if still_s < _ALL_ALIKE * limit_s:
            return None
        return f"every rank hangs at step {beats[0].step} ({beats[0].place}) for {still_s:.0f} s"
    if still_s < limit_s:
        return None
    behind = [rank for rank, beat in enumerate(beats) if beat.count == first]
    who = f"rank {behind[0]} hangs" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))} hang"
    there = beats[behind[0]]
    return f"{who} at step {there.step} ({there.place}): no rank made progress for {still_s:.0f} s"


def silent(beats: Sequence[Beat], still_s: Sequence[float], limit_s: float) -> str | None:
    """The rank without a heartbeat for too long: its process is stopped, or blocked outside of Python."""
    rank = max(range(len(beats)), key=still_s.__getitem__)
    if still_s[rank] < limit_s:
        return None
    last = beats[rank]
    where = f"last seen at step {last.step}, {last.place}"
    return f"rank {rank} hangs: no heartbeat from its process for {still_s[rank]:.0f} s ({where})"


class Watch:
    """A thread on every rank. Calls ``end`` to end the process when the job hangs."""

    def __init__(self, marks: Marks, limit_s: float, end: Callable[[str], None]) -> None:
        self._marks, self._limit, self._end = marks, limit_s, end
        self._over = threading.Event()

    def start(self) -> None:
        if self._limit <= 0 or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        # A connection of its own: the main thread's may be held by a wait. Every start of a job has a new store.
        store = shared_store()
        if store is None:
            return
        store = store.clone()
        names = [f"toolkit/watch/{rank}" for rank in range(dist.get_world_size())]
        self._report(store, names[dist.get_rank()], 0)  # from here on silence means something
        threading.Thread(target=self._run, args=(store, names, dist.get_rank()), daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _report(self, store: Any, name: str, tick: int) -> None:
        beat = self._marks.beat
        if compiling():  # a shape that is met for the first time in the middle of a run
            beat = replace(beat, untimed=True)
        store.set(name, json.dumps([tick, *vars(beat).values()]))

    def _run(self, store: Any, names: list[str], rank: int) -> None:
        seen: list[Beat] = []
        since = time.monotonic()
        heard: list[tuple[int, float]] = [(-1, since)] * len(names)
        """For each rank, the number of its last heartbeat and when it arrived."""
        tick = 0
        while not self._over.wait(_EVERY_S):
            tick += 1
            try:
                self._report(store, names[rank], tick)
                if not store.check(names):
                    continue  # not all have begun
                words = [json.loads(value) for value in store.multi_get(names)]
            except RuntimeError:
                return  # the store is gone, and with it the job
            now = time.monotonic()
            heard = [(word[0], now) if word[0] != was[0] else was for word, was in zip(words, heard, strict=True)]
            beats = [Beat(*word[1:]) for word in words]
            if beats != seen:
                seen, since = beats, now
            found = silent(beats, [now - at for _, at in heard], self._limit) or late(beats, now - since, self._limit)
            if found and not self._over.is_set():
                print(f"\n{found}; stack of this rank:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.stderr)
                self._end(found)
