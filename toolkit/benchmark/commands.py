"""`toolkit bench`, declared without importing anything heavy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command()(bench)


def bench(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")] = None,
    strategies: Annotated[str, typer.Option(help="others to measure beside the recipe's: zero2,fsdp2")] = "",
    options: Annotated[
        list[str] | None, typer.Option("--with", metavar="KEY=VALUE[,...]", help="another cell, with this; repeatable")
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="RECIPE", help="another recipe, in turns with this")] = None,
    turns: Annotated[int, typer.Option(help="of each cell, one after another")] = 3,
    steps: Annotated[int, typer.Option(help="timed in a turn")] = 5,
    warmup: Annotated[int, typer.Option(help="steps before them that are not timed")] = 2,
    full_rows: Annotated[bool, typer.Option("--full-rows", help="rows of max_length random tokens, no data")] = False,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="a trace of two steps of the recipe, for ui.perfetto.dev")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="the device's rate, for MFU; default: its data sheet's")] = None,
    find_batch: Annotated[
        bool, typer.Option("--find-batch", help="the largest micro-batch that fits, in place of the timings")
    ] = False,
    memory: Annotated[
        float | None, typer.Option(help="GiB per process, for --find-batch; default: what this machine has")
    ] = None,
    page: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="the page; default: runs/bench/RECIPE.html")
    ] = None,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="the result, - for standard output")
    ] = None,
) -> None:
    """Measure tokens/s, time, memory and MFU of a recipe, of its strategies and options, in turns."""
    from toolkit.benchmark.command import Request, bench_command

    named = tuple(name for name in strategies.split(",") if name)
    request = Request(recipe, tuple(overrides or ()), named, tuple(options or ()), against, turns, steps, warmup,
                      full_rows, profile, tflops, json_target, find_batch, memory, page)  # fmt: skip
    raise typer.Exit(bench_command(request))
