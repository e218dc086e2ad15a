"""`toolkit bench`: options, cells, turns, the screen and the JSON. Declared without importing anything heavy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.command_line import memory_option
from toolkit.command_options import JSON, OVERRIDES, RECIPE, PathLike, RecipeLike, parted
from toolkit.disk import write_text
from toolkit.errors import InputError
from toolkit.results import CommandResult, Result, write_json
from toolkit.terminal import cut, fitted, width

if TYPE_CHECKING:
    from toolkit.benchmark.cells import Cell
    from toolkit.recipe.resolve import Resolved


@dataclass(eq=False, repr=False)
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


@dataclass(eq=False, repr=False, kw_only=True)
class Request(BenchOptions):
    """Measure speed and memory of a recipe and variants. Reports tokens/s, step time, peak memory and MFU."""

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


def bench_command(request: Request) -> int:
    """Measure and print; returns the exit status. 0: every cell was measured. 1: one of them failed."""
    _check(request)
    if request.memory is not None and not request.find_batch:
        raise InputError("--memory: requires --find-batch")
    others = (request.strategies, request.options, request.against, request.profile)
    if request.find_batch and any(others):
        raise InputError("--find-batch: finds the micro-batch of one recipe; compare other cells in a separate run")
    if request.find_batch:
        return _find_batch(request, Result("bench"))
    from toolkit.report.bench_page import bench_page

    _resolved(request)  # a mistake leaves an earlier page as it was
    log = _log(request)
    page = Path(request.page) if request.page else log.with_name(f"{log.name[: -len('.log')]}.html")
    write_text(page, "")  # what cannot be written is reported before anything is measured
    say = (lambda line: None) if request.json_target == "-" else _say
    measured = measure(replace(request, say=say, log=log))
    document = measured.to_json()
    for line in table(document, width()):
        say(line)
    write_text(page, bench_page(document, log.stem))
    say(f"report: {page}")
    if request.json_target:
        write_json(document, request.json_target)
    return measured.exit_code


def _resolved(request: BenchOptions) -> Resolved:
    from toolkit.recipe.load import recipe_from, source_of
    from toolkit.strategies import resolve

    return resolve(recipe_from(request.recipe, request.overrides), source_of(request.recipe))


def _log(request: Request) -> Path:
    """What the ranks print; the page lies beside it."""
    from toolkit.report.names import page_name

    against = [f"against {Path(request.against).stem}"] if request.against else []
    words = [*request.overrides, *request.strategies, *request.options, *against]
    return Path("runs/bench") / f"{page_name(str(request.recipe), None, words)}.log"


@dataclass(frozen=True)
class Measured(CommandResult):
    """The result of `toolkit bench`."""

    cells: list[Cell]
    """One cell per measured recipe; the first is the requested one."""


def measure(request: BenchOptions) -> Measured:
    """Train each cell for some steps, interleaved. Raises InputError."""
    _check(request)
    result = Result("bench")
    from toolkit.benchmark.cells import Plan, as_json, make_cells, rate_of, run_cells
    from toolkit.data.preflight import check_data
    from toolkit.launch.group import WorkerGroup
    from toolkit.machine import cpu_count
    from toolkit.recipe.preflight import check_known

    cells, left_out = make_cells(
        request.recipe, request.overrides, _named(request.strategies), request.options, request.against
    )
    for note in dict.fromkeys(note for cell in cells for note in check_known(cell.resolved)):
        request.say(f"note: {note}")
    for cell in () if request.full_rows else cells:
        check_data(cell.resolved.recipe)
    for line in left_out:
        request.say(f"skipped: {line}")
    plan = Plan(request.turns, request.steps, request.warmup, request.full_rows)
    sizes = {cell.resolved.world_size for cell in cells}
    groups = {size: WorkerGroup(size, max(1, cpu_count() // size), log=Path(request.log).absolute()) for size in sizes}
    try:
        run_cells(cells, plan, request.profile, request.say, groups)
    finally:
        for group in groups.values():
            group.close()
    rate = rate_of(cells[0].resolved.device, request.tflops)
    document = result.finish(
        recipe_sha256=cells[0].resolved.sha256,
        device=_device(cells[0].resolved.device),
        cells=[as_json(cell, rate) for cell in cells],
        turns=request.turns,
        steps=request.steps,
        warmup=request.warmup,
        data="full rows of random tokens" if request.full_rows else "the recipe's",
        left_out=left_out,
    )
    return Measured(document, 0 if all(cell.failure is None for cell in cells) else 1, cells)


def _find_batch(request: Request, result: Result) -> int:
    """Find the largest micro-batch. 0: found. 1: micro_size 1 does not fit."""
    from toolkit.benchmark.find_batch import find_batch, measured_in_processes, memory_here
    from toolkit.launch.job import check_machine
    from toolkit.planning.hardware import GIB

    asked = _resolved(request)
    check_machine(asked)
    memory = memory_here(asked, request.memory)
    say = (lambda line: None) if request.json_target == "-" else _say
    say(f"{memory / GIB:.3f} GiB per process, of which 5 % stay free; rows of {asked.recipe.data.max_length} tokens")
    log = _log(request)
    found = find_batch(asked, memory, measured_in_processes(log), say)
    best = found.chosen
    document = result.finish(recipe_sha256=asked.sha256, device=_device(asked.device), **found.to_json())
    if request.json_target:
        write_json(document, request.json_target)
    if best is None:
        say("micro_size 1 does not fit; `toolkit plan` shows what does")
        return 1
    say(f"global batch {best.global_size}, unchanged:")
    say(f"batch: {{micro_size: {best.micro_size}, accumulation: {best.accumulation}}}")
    return 0


_HEADS = ("tokens/s", "vs first", "step s", "slowest", "peak GiB", "padding", "MFU")


def table(document: dict[str, Any], columns: int) -> list[str]:
    """The result for the screen, in so many columns: a line per cell, the phases of the recipe's step, and its
    profile."""
    cells = document["cells"]
    first = cells[0]["tokens_per_second"]
    rows = [_numbers(cell, first) for cell in cells]
    sizes = [max(map(len, column)) for column in zip(_HEADS, *(row for row in rows if row), strict=True)]
    room = columns - sum(size + 2 for size in sizes)
    label = max(0, min(room, max(12, *(len(cell["label"]) for cell in cells))))
    lines = ["", f"{'':{label}}{_right(_HEADS, sizes)}"]
    for cell, row in zip(cells, rows, strict=True):
        name = cell["label"]
        if not row:
            lines += fitted(f"{name:{label}}  {cell['reason']}", columns)
            continue
        if len(name) > label:  # above its numbers
            lines += fitted(name.replace(",", ", "), columns)
            name = ""
        lines.append(f"{name:{label}}{_right(row, sizes)}")
    if first:
        shares = cells[0]["phases"].items()
        phases = "phases of the first cell: " + " · ".join(f"{name} {share:.1%}" for name, share in shares)
        lines += ["", *fitted(phases, columns)]
    profile = cells[0].get("profile")
    if profile:
        lines += ["", f"trace: {profile['trace']}  (ui.perfetto.dev)"]
        if profile["device"]:
            parts = " · ".join(f"{k.replace('_', ' ')} {v:.3f} s" for k, v in profile["device"].items())
            lines += fitted(f"device: {parts}", columns)
        lines += ["", f"  {'time':>6}  {'calls':>6}  operation"]
        lines += [cut(f"  {op['share']:6.1%}  {op['calls']:6d}  {op['name']}", columns) for op in profile["operations"]]
    return lines


def _numbers(cell: dict[str, Any], first: float | None) -> list[str]:
    """Of one cell, by ``_HEADS``; empty for one that failed."""
    if cell["tokens_per_second"] is None:
        return []
    peak, mfu = cell["peak_allocated_bytes"], cell["mfu"]
    return [
        f"{cell['tokens_per_second']:,.0f}",
        f"{cell['tokens_per_second'] / first:.2f}" if first else "",
        f"{cell['seconds_per_step']:.3f}",
        f"{cell['seconds_spread'][1]:.3f}",
        f"{peak / 2**30:.3f}" if peak is not None else "-",
        f"{cell['padding']:.1%}",
        f"{mfu:.1%}" if mfu is not None else "-",
    ]


def _right(values: Sequence[str], sizes: Sequence[int]) -> str:
    return "".join(f"  {value:>{size}}" for value, size in zip(values, sizes, strict=True))


def _check(request: BenchOptions) -> None:
    for name, value in (("--turns", request.turns), ("--steps", request.steps)):
        if value < 1:
            raise InputError(f"{name} {value}: must be at least 1")
    if request.warmup < 0:
        raise InputError(f"--warmup {request.warmup}: must be 0 or more")
    if request.tflops is not None and request.tflops <= 0:
        raise InputError(f"--tflops {request.tflops:g}: TFLOP/s must be above 0")


def _named(names: Sequence[str]) -> list[str]:
    from toolkit.strategies import strategies

    known = list(strategies())
    for name in names:
        if name not in [*known, "all"]:
            raise InputError(f"--strategies: {name} is not one of {', '.join(known)}, or all")
    return known if "all" in names else list(names)


def _device(kind: str) -> str:
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name(0)
    return kind


def _say(line: str) -> None:
    sys.stdout.write("\n".join(fitted(line, width())) + "\n")
    sys.stdout.flush()
