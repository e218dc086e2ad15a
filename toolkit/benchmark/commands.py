"""`toolkit bench`, declared without importing anything heavy."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.command_line import memory_option


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command()(bench)


def bench(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="override recipe values")
    ] = None,
    strategies: Annotated[str, typer.Option(help="further strategies to measure: zero2,fsdp2")] = "",
    options: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KEY=VALUE[,...]", help="add a cell with this override; repeatable"),
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="RECIPE", help="add a cell with another recipe")] = None,
    turns: Annotated[int, typer.Option(help="measurements of each cell, interleaved")] = 3,
    steps: Annotated[int, typer.Option(help="timed steps per turn")] = 5,
    warmup: Annotated[int, typer.Option(help="untimed steps before them")] = 2,
    full_rows: Annotated[
        bool, typer.Option("--full-rows", help="use full rows of random tokens instead of data")
    ] = False,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="trace two steps for ui.perfetto.dev")] = None,
    tflops: Annotated[float | None, typer.Option(help="peak rate of the device, for MFU; default: data sheet")] = None,
    find_batch: Annotated[
        bool, typer.Option("--find-batch", help="find the largest micro-batch that fits; no timings")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            parser=memory_option,
            help="GiB per process, for --find-batch; default: all of this machine's",
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="write the page; default: in runs/bench, by recipe and overrides"),
    ] = None,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """Measure speed and memory of a recipe and variants. Reports tokens/s, step time, peak memory and MFU."""
    from toolkit.benchmark.command import Request, bench_command

    named = tuple(name for name in strategies.split(",") if name)
    request = Request(recipe, tuple(overrides or ()), named, tuple(options or ()), against, turns, steps, warmup,
                      full_rows, profile, tflops, json_target, find_batch, memory, page)  # fmt: skip
    raise typer.Exit(bench_command(request))
