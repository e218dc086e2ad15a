"""`toolkit watch RUN...`: the runs in a terminal, drawn again as they change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from toolkit.errors import InputError
from toolkit.watching.runs import ACTIVE, MARK, Run, find_runs, read_run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 30


def watch(folders: Sequence[str], once: bool = False, every: float = 2.0, console: Console | None = None) -> int:
    """Show the runs until all have ended, or Ctrl-C; ``once``: one picture. A folder may be a run's or hold several.

    Returns 0. Raises InputError for a folder without a run.
    """
    console = console or Console(highlight=False)
    paths = _named(folders)
    if once or not console.is_terminal:
        console.print(picture([read_run(path) for path in paths], console.width))
        return 0
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            runs = [read_run(path) for path in paths]
            live.update(picture(runs, console.width), refresh=True)
            if all(run.state not in ACTIVE for run in runs):
                return 0
            time.sleep(every)


def _named(folders: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        path = Path(folder)
        if not path.is_dir():
            raise InputError(f"{folder}: no such folder")
        runs = [path] if (path / MARK).is_file() or (path / "metrics.jsonl").is_file() else find_runs(path)
        if not runs:
            raise InputError(f"{folder}: no run in this folder (a run has {MARK}); start one with toolkit train")
        found += runs
    return list(dict.fromkeys(found))


def picture(runs: Sequence[Run], width: int) -> Group:
    """A row for each run, its loss as a line of blocks, and what was said about it."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("run", overflow="fold", max_width=max(16, width // 3))
    table.add_column("state")
    for name in ("step", "loss", "norm", "tok/s", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("loss so far", no_wrap=True)
    for run in runs:
        last = run.last
        table.add_row(
            Text(_plain(str(run.folder))),
            Text(run.state, style={"running": "bold", "ended early": "red"}.get(run.state, "")),
            _steps(run),
            _shown(last.loss if last else None, lambda loss: f"{loss:.4f}"),
            _shown(last.grad_norm if last else None, lambda norm: f"{norm:.3g}"),
            _shown(last.tokens_per_second if last else None, lambda rate: f"{rate:,.0f}"),
            _shown(run.seconds_left, lasting),
            spark([step.loss for step in run.steps], min(_WIDTH, max(8, width // 5))),
        )
    notes = [Text(f"{run.folder.name}: {_plain(note)}", style="yellow") for run in runs for note in run.notes]
    saved = [
        Text(f"{run.folder.name}: checkpoints at steps {', '.join(map(str, run.checkpoints[-4:]))}", style="dim")
        for run in runs
        if run.checkpoints
    ]
    answers = [
        Text(f"{run.folder.name}: step {run.sampled}: {_plain(prompt)[:60]} → {_plain(answer)}")
        for run in runs
        for prompt, answer in run.samples
    ]
    return Group(table, *notes, *answers, *saved)


def _steps(run: Run) -> str:
    done = run.last.step if run.last else 0
    return f"{done}/{run.total}" if run.total else str(done)


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "–" if value is None else form(value)


def lasting(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def spark(values: Sequence[float | None], width: int) -> str:
    """Means of consecutive values as blocks of eight heights; nothing for fewer than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    columns = min(width, len(known))
    parts = [known[at * len(known) // columns : (at + 1) * len(known) // columns] for at in range(columns)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (high - low) or 1.0
    return "".join(_BARS[min(7, int(8 * (mean - low) / scale))] for mean in means)


def _plain(text: str) -> str:
    """Without control characters: a log or a folder's name cannot steer the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
