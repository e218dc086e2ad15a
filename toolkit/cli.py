"""The commands. Each imports what it needs when it runs: `--help` answers at once."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import Annotated

import typer

from toolkit import __version__
from toolkit.benchmark import commands as bench_commands
from toolkit.doctor import commands as doctor_commands
from toolkit.help import Commands
from toolkit.importing import commands as import_commands
from toolkit.inspection import commands as data_commands
from toolkit.linting import commands as lint_commands
from toolkit.migration import commands as migrate_commands
from toolkit.planning import commands as plan_commands
from toolkit.studio import commands as studio_commands
from toolkit.verification import commands as verify_commands
from toolkit.verification.scripts import commands as script_commands
from toolkit.watching import commands as watch_commands

app = typer.Typer(
    name="toolkit",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...", help="override recipe values")]
JsonTarget = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
]


class Engine(StrEnum):
    """What `toolkit config --for` writes files for."""

    transformers = "transformers"


def _show_version(wanted: bool) -> None:
    if wanted:
        from toolkit.results import versions

        packages = ", ".join(f"{name} {version or 'missing'}" for name, version in versions().items())
        typer.echo(f"toolkit {__version__}\n{packages}")
        raise typer.Exit


@app.callback()
def toolkit(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None:
    """One recipe, every strategy: fine-tuning proven equal to a plain PyTorch loop."""


@app.command()
def config(
    recipe: RecipeFile,
    overrides: Overrides = None,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="DIR", help="folder for the files")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print every derived value and its reason")] = False,
    engine: Annotated[
        Engine | None,
        typer.Option("--for", help="transformers: for the Trainer on a model that from_pretrained splits"),
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Write a recipe's launch files. They are accelerate.yaml, deepspeed.json, training_args.json and launchers."""
    from toolkit.launch.command import config_command

    config_command(recipe, overrides or [], output, explain, json_target, engine.value if engine else None)


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume from the latest valid checkpoint")] = False,
    extend: Annotated[
        bool,
        typer.Option("--extend", help="with --resume: allow a run length that changes the learning rates"),
    ] = False,
    changed_data: Annotated[
        bool,
        typer.Option("--changed-data", help="with --resume: go on although the rows are others than before"),
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="restart automatically when a rank dies or hangs")
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="stop after one forward and backward of the longest micro-batch; nothing is left of it"
        ),
    ] = False,
    json_target: JsonTarget = None,
) -> None:
    """Train a recipe through `accelerate launch`."""
    from toolkit.launch.job import train as launch_and_train
    from toolkit.results import write_json

    result = launch_and_train(
        recipe,
        overrides or [],
        resume=resume,
        extend=extend,
        changed_data=changed_data,
        max_restarts=max_restarts,
        dry_run=dry_run,
    )
    if dry_run and json_target != "-":
        typer.echo(f"next: toolkit train {shlex.join([recipe, *(overrides or [])])}")
    if json_target:
        write_json(result, json_target)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="a checkpoint or run folder")],
    output: Annotated[str, typer.Option("-o", "--output", metavar="DIR", help="new folder")],
    merged: Annotated[bool, typer.Option("--merged", help="merge the adapter into the base model")] = False,
    dequantise: Annotated[bool, typer.Option("--dequantise", help="qlora: merge into dequantised weights")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="the best checkpoint by run.metric, by default the lowest held-out loss")
    ] = False,
    ema: Annotated[bool, typer.Option("--ema", help="the averages of run.ema in place of the weights")] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="upload to a private hub repository")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="D", help="fp32, bf16 or fp16; a merged model: default the base's")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="transformers, or the training state: deepspeed-universal, torch (torch.distributed.checkpoint)",
        ),
    ] = "transformers",
    json_target: JsonTarget = None,
) -> None:
    """Export a checkpoint for from_pretrained and PEFT. The folder has a model card. Or, with --format, a checkpoint to
    continue from with DeepSpeed or FSDP."""
    from toolkit.checkpoint_export.command import export_command

    export_command(
        checkpoint, output, merged, json_target, best=best, push=push, dequantise=dequantise, ema=ema, form=form,
        dtype=dtype,
    )  # fmt: skip


@app.command("import-checkpoint")
def import_checkpoint(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="of DeepSpeed, FSDP, accelerate, the Trainer or torch")
    ],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="what the run continues with")],
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="optimizer steps taken, where the checkpoint does not say")
    ] = None,
    json_target: JsonTarget = None,
) -> None:
    """Continue from another tool's checkpoint. It is written into the recipe's run folder, for train --resume."""
    from toolkit.checkpoint_import.command import run_import

    run_import(checkpoint, recipe, overrides or [], step, json_target)


@app.command()
def init(
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="the recipe to write")] = "recipe.yaml",
    model: Annotated[str | None, typer.Option(help="hub id or folder")] = None,
    data: Annotated[str | None, typer.Option(help="file, folder or hub id")] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="text, prompt-completion, messages")] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="a held-out file, or a share of the training data such as 0.05")
    ] = None,
    lora: Annotated[int | None, typer.Option(help="rank of a LoRA adapter; 0: train every weight")] = None,
    strategy: Annotated[str | None, typer.Option(help="single, ddp, zero1, zero2, zero3, fsdp1, fsdp2")] = None,
    processes: Annotated[int | None, typer.Option(help="processes per node")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, bf16-pure")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False,
) -> None:
    """Write a starter recipe, interactively or from flags."""
    from toolkit.recipe.starter import init_command

    answers = {
        "model": model,
        "data": data,
        "format": data_format,
        "eval": evaluation,
        "lora": lora,
        "strategy": strategy,
        "processes": processes,
        "precision": precision,
        "steps": steps,
    }
    init_command(output, answers, force)


@app.command()
def schema(
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="write to a file")] = None,
    kind: Annotated[
        lint_commands.Kind, typer.Option("--for", help="the recipe, or a configuration file of another program")
    ] = lint_commands.Kind.recipe,
) -> None:
    """Print the JSON schema of a recipe or configuration file. Editors complete and check files with it."""
    if kind is not lint_commands.Kind.recipe:
        lint_commands.schema_of_file(kind.value, output)
        return
    from toolkit.recipe.json_schema import schema_command

    schema_command(output)


app.command()(data_commands.data)
verify_commands.register(app)
script_commands.register(app)
app.command()(plan_commands.plan)
app.command()(bench_commands.bench)
lint_commands.register(app)
migrate_commands.register(app)
import_commands.register(app)
watch_commands.register(app)
studio_commands.register(app)
doctor_commands.register(app)
