"""`toolkit plan`, declared without importing anything heavy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command()(plan)


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="a recipe; or a model's id, folder or config")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")] = None,
    gpu: Annotated[str | None, typer.Option(help="device by name, for example h100")] = None,
    memory: Annotated[float | None, typer.Option(help="GiB per device, in place of the table's")] = None,
    gpus: Annotated[int | None, typer.Option(help="devices per node; default: the recipe's processes")] = None,
    nodes: Annotated[int | None, typer.Option(help="default: the recipe's")] = None,
    gpu_table: Annotated[str | None, typer.Option(help="YAML file with devices of your own")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s per direction between nodes, per node")] = None,
    lora: Annotated[int | None, typer.Option(help="rank of a LoRA adapter (a model in place of a recipe)")] = None,
    length: Annotated[int | None, typer.Option(help="tokens per row")] = None,
    micro: Annotated[int | None, typer.Option(help="rows per device and forward pass")] = None,
    headroom: Annotated[float, typer.Option(help="share of the memory that stays free")] = 0.05,
    every: Annotated[bool, typer.Option("--all", help="show every candidate")] = False,
    scale: Annotated[bool, typer.Option("--scale", help="from 1 to 1024 devices, on paper")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="run two steps here, correct the rates")] = False,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="write the chosen recipe")
    ] = None,
    page: Annotated[str | None, typer.Option("--html", metavar="FILE", help="one page with the pictures")] = None,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="the result, - for standard output")
    ] = None,
) -> None:
    """Predict memory and time of every strategy, and the fastest that fits; nothing is loaded or run."""
    from toolkit.planning.command import Request, plan_command

    request = Request(
        recipe, tuple(overrides or ()), gpu, memory, gpus, nodes, gpu_table, link, lora, length, micro,
        headroom, every, scale, calibrate, output, json_target, page,
    )  # fmt: skip
    raise typer.Exit(plan_command(request))
