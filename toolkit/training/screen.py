"""The screen of a run: a line about the run, a line of evidence, and a progress bar; other output goes to the logs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from toolkit.counts import trained_share
from toolkit.data.reading import telling
from toolkit.launch.failure import SCREEN_VARIABLE
from toolkit.launch.files import parts
from toolkit.launch.relay import take_screen
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.tasks.base import Task
from toolkit.tasks.labels import Labels
from toolkit.training.metrics import StepRecord


def quiet(log: Path) -> TextIO:
    """Send this process's standard output and error to ``log``, C libraries' included; returns the screen.

    Four packages warn on every rank; what a user must see is written to the screen on purpose.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    named = os.environ.get(SCREEN_VARIABLE)
    terminal = os.open(named, os.O_WRONLY) if named else os.dup(1)
    screen = os.fdopen(terminal, "w", buffering=1, encoding="utf-8")
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return screen


def move_log(now: Path, final: Path) -> None:
    """Continue the log under its final name; its contents are kept."""
    final.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(final, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, now.read_bytes())
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    shutil.rmtree(now.parent, ignore_errors=True)


class _Enduring:
    """A stream that may close: a closed terminal, or a pipe without a reader, does not end the training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def rate_of(task: Task) -> str:
    """The unit of ``tokens_per_second``, in short: of models that take no tokens and have one label per sample,
    samples."""
    no_tokens = task.media is not None and not task.media.tokens and task.labels is Labels.SAMPLE
    return "samples/s" if no_tokens else "tok/s"


_WIDTH = 28
"""Of a bar."""
_PATIENCE = 0.5
"""Seconds that tokenising takes before its bar is shown."""


@contextlib.contextmanager
def reading(stream: TextIO | None) -> Iterator[None]:
    """Inside, a line of a terminal says how many rows are tokenised; it goes at the end. ``stream``: of rank 0."""
    console = Console(file=cast(TextIO, _Enduring(stream)), highlight=False) if stream else None
    if console is None or not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=_WIDTH), MofNCompleteColumn(), TextColumn("rows"))
    bar, began, shown = Progress(*columns, console=console, transient=True), time.monotonic(), False

    def told(key: str, rows: int, total: int | None) -> None:
        nonlocal shown
        if not shown and time.monotonic() - began < _PATIENCE:
            return
        if not shown:
            take_screen(stream)
            bar.add_task(f"tokenising {key}", total=total)
            bar.start()
            shown = True
        bar.update(bar.task_ids[0], description=f"tokenising {key}", completed=rows, total=total)

    try:
        with telling(told):
            yield
    finally:
        bar.stop()


T = TypeVar("T")


class Screen:
    """Rank 0's view of a run; that of the other ranks shows nothing. ``rate``: the unit of speed."""

    def __init__(self, stream: TextIO | None, total_steps: int, done: int = 0, rate: str = "tok/s") -> None:
        self.rate = rate
        self.console: Console | None = None
        if stream:
            self.console = Console(file=cast(TextIO, _Enduring(stream)), highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self.total_steps = total_steps
        if self.console and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("  step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=_WIDTH),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=done)
            self._bar.start()

    def say(self, text: str) -> None:
        if self.console:
            self.console.print(text, markup=False)

    def step(self, record: StepRecord, memory: int) -> None:
        lost = "– (no supervised token)" if record.without_loss else "not finite"
        loss = lost if record.loss is None else f"{record.loss:.4f}"
        norm = "not finite" if record.grad_norm is None else f"{record.grad_norm:.3g}"
        skipped = "  skipped (overflow)" if record.skipped else ""
        rate = f"{record.tokens_per_second:,.0f} {self.rate}"
        figures = f"loss {loss}  norm {norm}  {rate}  {memory / 2**30:.1f} GiB{skipped}"
        if self._bar:
            self._bar.update(self._task, completed=record.step, description=figures)
        else:
            self.say(f"  step {record.step}/{self.total_steps}  {figures}")

    def moving(self, doing: str, items: Iterable[T], total: int | None = None) -> Iterator[T]:
        """``items``; meanwhile the last line of a terminal says how many of ``total`` there have been, behind the loss
        of the last step."""
        if not self._bar:
            yield from items
            return
        figures = self._bar.tasks[0].description
        loss = figures.partition("  norm")[0]
        for number, item in enumerate(items):
            of_all = f"{number}/{total}" if total else f"{number}"
            self._bar.update(self._task, description=f"{loss}  {doing} {of_all}".lstrip())
            yield item
        self._bar.update(self._task, description=figures)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


def headline(resolved: Resolved, trainable: int, total: int) -> str:
    """Summary of the run, with its global batch as a product."""
    where = "on GPU" if resolved.device == "cuda" else "on CPU"
    processes = "1 process" if resolved.world_size == 1 else f"{resolved.world_size} processes"
    return (
        f"{resolved.recipe.strategy.name} · {processes} {where} · {resolved.recipe.precision} · "
        f"global batch {resolved.global_size} = {resolved.micro_size} micro × {resolved.accumulation} accumulation × "
        f"{parts(resolved)} · {trained_share(trainable, total)}"
    )


def engaged_line(claims: list[Claim]) -> str:
    """The evidence that the strategy is active, in one line."""
    return "active: " + " · ".join(f"{claim.claim} {claim.seen}" for claim in claims)
