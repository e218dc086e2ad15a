"""What `toolkit plan` is asked, declared without importing anything heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import typer

from toolkit.command_line import memory_option, tokens_option
from toolkit.command_options import JSON, OVERRIDES, PathLike, RecipeLike


@dataclass(eq=False, repr=False)
class PlanOptions:
    """What a plan is asked. ``recipe``: a recipe's file or object, or a model's config or folder; None: ``script`` says
    it."""

    recipe: Annotated[
        RecipeLike | None,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="a recipe, or a model: hub id, folder or config file; with --script it may be left out",
            show_default=False,
        ),
    ] = None
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    _: KW_ONLY
    gpu: Annotated[str | None, typer.Option(help="device name, for example h100; cpu: host memory")] = None
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            parser=memory_option,
            help="GiB per device, overrides the table; with --gpu cpu of the host",
        ),
    ] = None
    gpus: Annotated[int | None, typer.Option(help="devices per node; default: machine.processes")] = None
    nodes: Annotated[int | None, typer.Option(help="number of nodes; default: machine.nodes")] = None
    gpu_table: Annotated[PathLike | None, typer.Option(help="YAML file with more devices")] = None
    link: Annotated[float | None, typer.Option(help="GB/s per direction between nodes, per node")] = None
    lora: Annotated[int | None, typer.Option(help="rank of a LoRA adapter (for a model without a recipe)")] = None
    qlora: Annotated[int | None, typer.Option(help="the same on a base of 4-bit weights (QLoRA)")] = None
    full: Annotated[bool, typer.Option("--full", help="train all weights: the default for a model")] = False
    """What a plan of a model without a recipe says anyway."""
    length: Annotated[int | None, typer.Option(help="tokens per row")] = None
    micro: Annotated[int | None, typer.Option(help="rows per device and forward pass")] = None
    images: Annotated[int | None, typer.Option(help="images (or tiles of images) per row")] = None
    image_size: Annotated[
        str | None, typer.Option(metavar="WIDTHxHEIGHT", help="pixels of an image, where the model takes any size")
    ] = None
    headroom: Annotated[
        float | None,
        typer.Option(
            help="fraction of the memory to keep free, beyond what nvidia-smi shows; default: 0, of host memory 0.05"
        ),
    ] = None
    every: Annotated[bool, typer.Option("--all", help="show every candidate")] = False
    scale: Annotated[bool, typer.Option("--scale", help="predict 1 to 1024 devices")] = False
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure the rates on this machine")] = False
    script: Annotated[
        PathLike | None,
        typer.Option(
            metavar="FILE", help="a training script in Python: its settings are read from its text, nothing is run"
        ),
    ] = None
    """Its settings stand in for a recipe (toolkit/planning/scripted.py)."""
    loop: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@VERSION]",
            help="the training loop: toolkit (default), bare, accelerate, trainer, trainer@4.48, trl",
        ),
    ] = None
    """None: the script's, or the toolkit's own."""
    loop_set: Annotated[
        Sequence[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="a habit of that loop: held_outputs, autocast, prepare_for_kbit, float32_base, double_quant, "
            "reentrant, tf32 (true or false), kernel (fused or foreach), eval_micro, eval_kept (numbers)",
        ),
    ] = ()
    """Habits of the loop: toolkit/planning/loops/named.py."""
    fit: Annotated[
        Sequence[str],
        typer.Option(
            metavar="WHAT",
            help="find the largest length, micro or model that fits, or the fewest gpus, or the smallest gpu",
        ),
    ] = ()
    explain: Annotated[bool, typer.Option("--explain", help="where the bytes are, and what more would cost")] = False
    price: Annotated[
        Sequence[str],
        typer.Option(
            metavar="[NAME=]NUMBER|FILE", help="price of an hour of one device, or a YAML file of NAME: NUMBER"
        ),
    ] = ()
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            parser=tokens_option,
            help="tokens of the training data, for example 10M: steps, time and cost of the run",
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(help="how often the run reads them (run.epochs)")] = None
    disk: Annotated[
        float | None, typer.Option(help="GB/s of a node's disk: how long loading, saving and resuming take")
    ] = None
    cache: Annotated[bool, typer.Option("--no-cache", help="do not read or write the plan cache")] = True
    """Whether traces are taken from disk and kept there (toolkit/planning/cache.py)."""
    output: Annotated[
        PathLike | None, typer.Option("-o", "--output", metavar="FILE", help="write the chosen recipe to FILE")
    ] = None

    @property
    def source(self) -> str:
        """The name of what is planned, in messages."""
        from toolkit.recipe.load import source_of

        return source_of(self.script or self.recipe or "recipe")


@dataclass(eq=False, repr=False, kw_only=True)
class Request(PlanOptions):
    """Predict memory and time of every strategy. Chooses the fastest that fits; nothing is loaded or run."""

    page: Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page with charts")] = None
    json_target: Annotated[str | None, JSON] = None
