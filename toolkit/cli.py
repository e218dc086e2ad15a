"""The commands. Each imports what it needs when it runs: `--help` answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from toolkit import __version__
from toolkit.benchmark.command import bench_command
from toolkit.checkpoint_export.command import export_command
from toolkit.checkpoint_import.command import run_import
from toolkit.command_options import command_of
from toolkit.doctor.commands import doctor_command
from toolkit.help import Commands
from toolkit.importing.commands import import_command
from toolkit.inspection.command import data_command
from toolkit.launch.command import config_command, train_command
from toolkit.linting import commands as lint_commands
from toolkit.migration.commands import migrate_command
from toolkit.planning.options import Request as PlanRequest
from toolkit.studio.command import studio_command
from toolkit.verification.commands import compare_command, verify_command
from toolkit.verification.scripts.commands import SETTINGS, prove_command, record_command

app = typer.Typer(
    name="toolkit",
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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


@dataclass(eq=False, repr=False)
class InitRequest:
    """Write a starter recipe, interactively or from flags."""

    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="the recipe to write")] = "recipe.yaml"
    model: Annotated[str | None, typer.Option(help="hub id or folder")] = None
    data: Annotated[str | None, typer.Option(help="file, folder or hub id")] = None
    format: Annotated[str | None, typer.Option("--format", help="text, prompt-completion, messages")] = None
    eval: Annotated[
        str | None, typer.Option("--eval", help="a held-out file, or a share of the training data such as 0.05")
    ] = None
    lora: Annotated[int | None, typer.Option(help="rank of a LoRA adapter; 0: train every weight")] = None
    strategy: Annotated[str | None, typer.Option(help="single, ddp, zero1, zero2, zero3, fsdp1, fsdp2")] = None
    processes: Annotated[int | None, typer.Option(help="processes per node")] = None
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, bf16-pure")] = None
    steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None
    force: Annotated[bool, typer.Option("--force", help="overwrite the file")] = False


@app.command("init")
@command_of
def init(request: InitRequest) -> None:
    from toolkit.recipe.starter import init_command

    answers = dict(vars(request))
    init_command(answers.pop("output"), force=answers.pop("force"), answers=answers)


@app.command()
def watch(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="run folders, or folders that contain runs")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print the state once and exit")] = False,
) -> None:
    """Watch runs: step, loss, speed, time left. Only their folders are read; the runs do not notice."""
    from toolkit.watching.screen import watch as watch_runs

    raise typer.Exit(watch_runs(runs or ["runs"], once))


@app.command()
def schema(
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="write to a file")] = None,
    kind: Annotated[
        lint_commands.Kind, typer.Option("--for", help="the recipe, or a configuration file of another program")
    ] = "recipe",
) -> None:
    """Print the JSON schema of a recipe or configuration file. Editors complete and check files with it."""
    if kind != "recipe":
        lint_commands.schema_of_file(kind, output)
        return
    from toolkit.recipe.json_schema import schema_command

    schema_command(output)


@app.command("plan")
@command_of
def plan(request: PlanRequest) -> int:
    from toolkit.planning.command import plan_command

    return plan_command(request)


app.command("data")(command_of(data_command))
app.command("studio")(command_of(studio_command))
app.command("train")(command_of(train_command))
app.command("export")(command_of(export_command))
app.command("import-checkpoint")(command_of(run_import))
app.command("verify")(command_of(verify_command))
app.command("prove", context_settings=SETTINGS)(command_of(prove_command))
app.command("record", context_settings=SETTINGS)(command_of(record_command))
app.command("compare")(command_of(compare_command))
app.command("bench")(command_of(bench_command))
app.command("config")(command_of(config_command))
app.command("lint", help="Find contradictions and traps in configuration files.")(lint_commands.lint_command)
app.command("explain", help="Explain a finding, or show which layer sets a key.")(lint_commands.explain_command)
app.command("migrate", help="Convert launch files to another strategy.")(migrate_command)
app.command("import", help="Make a recipe of another tool's configuration.")(import_command)
app.command("doctor", help="Check packages and devices, and what will not work here.")(doctor_command)
