"""`toolkit bench`, declared without importing anything heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import typer

from toolkit.command_line import memory_option
from toolkit.options import JSON, OVERRIDES, RECIPE, PathLike, RecipeLike, command_of, parted


@dataclass(frozen=True)
class BenchOptions:
    """What is measured."""

    recipe: Annotated[RecipeLike, RECIPE]
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    _: KW_ONLY
    strategies: Annotated[Sequence[str], typer.Option(help="further strategies to measure: zero2,fsdp2"), parted] = ()
    options: Annotated[
        Sequence[str],
        typer.Option("--with", metavar="KEY=VALUE[,...]", help="add a cell with this override; repeatable"),
    ] = ()
    against: Annotated[PathLike | None, typer.Option(metavar="RECIPE", help="add a cell with another recipe")] = None
    turns: Annotated[int, typer.Option(help="measurements of each cell, interleaved")] = 3
    steps: Annotated[int, typer.Option(help="timed steps per turn")] = 5
    warmup: Annotated[int, typer.Option(help="untimed steps before them")] = 2
    full_rows: Annotated[bool, typer.Option("--full-rows", help="use full rows of random tokens instead of data")] = (
        False
    )
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="trace two steps for ui.perfetto.dev")] = None
    tflops: Annotated[float | None, typer.Option(help="peak rate of the device, for MFU; default: data sheet")] = None
    say: Callable[[str], None] = lambda line: None
    """Is told lines of progress; the command shows them."""
    log: PathLike = "runs/bench/bench.log"
    """For the output of the ranks; the command names it after the recipe and what it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Request(BenchOptions):
    """The command line."""

    find_batch: Annotated[
        bool, typer.Option("--find-batch", help="find the largest micro-batch that fits; no timings")
    ] = False
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            parser=memory_option,
            help="GiB per process, for --find-batch; default: all of this machine's",
        ),
    ] = None
    page: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="write the page; default: in runs/bench, by recipe and overrides"),
    ] = None
    json_target: Annotated[str | None, JSON] = None


@command_of(Request)
def bench(request: Request) -> int:
    """Measure speed and memory of a recipe and variants. Reports tokens/s, step time, peak memory and MFU."""
    from toolkit.benchmark.command import bench_command

    return bench_command(request)
