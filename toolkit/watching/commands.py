"""`toolkit watch`, declared without importing anything heavy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command()(watch)


def watch(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="run folders, or folders that contain runs")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print the state once and exit")] = False,
) -> None:
    """Watch runs: step, loss, speed, time left. Only their folders are read; the runs do not notice."""
    from toolkit.watching.screen import watch as watch_runs

    raise typer.Exit(watch_runs(runs or ["runs"], once))
