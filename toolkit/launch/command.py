"""`toolkit train` and `toolkit config`: their options, what they print and write. Declared without importing anything
heavy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.command_options import JSON, OVERRIDES, RECIPE, RecipeLike
from toolkit.errors import InputError
from toolkit.results import CommandResult, Result, write_json

if TYPE_CHECKING:
    from toolkit.recipe.resolve import Decision, Resolved
    from toolkit.recipe.schema import Recipe


@dataclass(eq=False, repr=False)
class TrainOptions:
    """What is trained, and from where."""

    recipe: Annotated[RecipeLike, RECIPE]
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    _: KW_ONLY
    resume: Annotated[bool, typer.Option("--resume", help="resume from the latest valid checkpoint")] = False
    extend: Annotated[
        bool, typer.Option("--extend", help="with --resume: allow a run length that changes the learning rates")
    ] = False
    changed_data: Annotated[
        bool, typer.Option("--changed-data", help="with --resume: go on although the rows are others than before")
    ] = False
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="restart automatically when a rank dies or hangs")
    ] = 0
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="stop after one forward and backward of the longest micro-batch; nothing is left of it"
        ),
    ] = False


@dataclass(eq=False, repr=False, kw_only=True)
class TrainRequest(TrainOptions):
    """Train a recipe through `accelerate launch`."""

    json_target: Annotated[str | None, JSON] = None


def train_command(request: TrainRequest) -> None:
    """Train, and write the result. Raises InputError, RunFailed, Stopped."""
    from toolkit.launch.job import train

    result = train(request)
    if request.dry_run and request.json_target != "-":
        print(f"next: toolkit train {shlex.join([str(request.recipe), *request.overrides])}")
    if request.json_target:
        write_json(result, request.json_target)


@dataclass(eq=False, repr=False)
class ConfigRequest:
    """Write a recipe's launch files. They are accelerate.yaml, deepspeed.json, training_args.json and launchers."""

    recipe: Annotated[str, RECIPE]
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="DIR", help="folder for the files")] = None
    explain: Annotated[bool, typer.Option("--explain", help="print every derived value and its reason")] = False
    engine: Annotated[
        Literal["transformers"] | None,
        typer.Option("--for", help="transformers: for the Trainer on a model that from_pretrained splits"),
    ] = None
    json_target: Annotated[str | None, JSON] = None


def config_command(request: ConfigRequest) -> None:
    """Write the files, and print what they are and what is next. Raises InputError."""
    from toolkit.launch.files import SCRIPTS, accelerate_leaves_apart
    from toolkit.recipe.needs import why_no_tokenizer

    output, explain, json_target, engine = request.output, request.explain, request.json_target, request.engine
    if output is None and not explain and json_target is None:
        raise InputError("toolkit config: give -o DIR to write the files, or --explain to see the derived values")
    configuration = write_config(request.recipe, output, overrides=request.overrides, engine=engine)
    resolved = configuration.resolved
    lines = []
    if explain:
        lines += explained(resolved)
    lines += [f"note: {note}" for note in configuration.notes]
    if output is not None:
        lines.append(f"wrote {', '.join(map(str, configuration.files))}")
        if (reason := why_no_tokenizer(resolved.recipe)) is not None:
            lines.append(f"before training: tokenizer.path: {reason}")
        if accelerate_leaves_apart(resolved):
            lines.append(
                "note: machine.device: cpu: without a GPU accelerate does not connect the processes of your own "
                f"scripts; start them with {shlex.quote(f'{output}/{SCRIPTS}')} SCRIPT"
            )
        lines.append(f"next: {_next(resolved, output, [request.recipe, *request.overrides], engine)}")
    if json_target != "-":
        print("\n".join(lines))
    if json_target:
        write_json(configuration.to_json(), json_target)


@dataclass(frozen=True)
class Configuration(CommandResult):
    """The result of `toolkit config`: the launch files and every derived value with its reason."""

    resolved: Resolved
    files: tuple[Path, ...]
    """Empty if nothing was written."""
    notes: tuple[str, ...] = ()
    """What a user should know of values that can train."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.resolved.decisions


def write_config(
    recipe: str | Path | Recipe,
    folder: str | Path | None,
    *,
    overrides: Sequence[str] = (),
    engine: str | None = None,
) -> Configuration:
    """Write accelerate.yaml, training_args.json, launch.sh and the strategy's own files into ``folder`` (None: decide
    only). A recipe that is an object is written beside them, as recipe.yaml. ``engine``: ``transformers`` writes the
    files for its Trainer on a model that from_pretrained splits.

    Raises InputError if the recipe or the folder cannot be used.
    """
    from toolkit.launch.files import launch_files, write_files
    from toolkit.launch.split_files import split_files, split_notes
    from toolkit.recipe.load import recipe_from, recipe_yaml, source_of
    from toolkit.recipe.preflight import check_known
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    result = Result("config")
    resolved = resolve(recipe_from(recipe, overrides), source_of(recipe))
    notes = check_known(resolved)
    if engine is not None:
        notes = [*notes, *split_notes(resolved)]  # refuses what such files cannot say, also where none are written
    paths: list[Path] = []
    if folder is not None:
        own = isinstance(recipe, Recipe)
        recipe_file = str(Path(folder) / "recipe.yaml") if own else str(recipe)
        files = (
            launch_files(resolved, folder, recipe_file, overrides, stay=True)
            if engine is None
            else split_files(resolved, folder)
        )
        if isinstance(recipe, Recipe):
            files["recipe.yaml"] = recipe_yaml(recipe)
        try:
            paths = write_files(files, folder)
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}") from None
    document = result.finish(
        recipe_sha256=resolved.sha256,
        device=resolved.device,
        files=[str(path) for path in paths],
        decisions=[vars(decision) for decision in resolved.decisions],
        notes=notes,
    )
    return Configuration(document, 0, resolved, tuple(paths), tuple(notes))


def _next(resolved: Resolved, output: str, arguments: Sequence[str], engine: str | None) -> str:
    from toolkit.launch.files import SCRIPTS, accelerate_leaves_apart

    if engine is not None:
        accelerate = f"accelerate launch --config_file {shlex.quote(f'{output}/accelerate.yaml')}"
        start = shlex.quote(f"{output}/{SCRIPTS}") if accelerate_leaves_apart(resolved) else accelerate
        return f"{start} SCRIPT"
    if resolved.recipe.machine.nodes > 1:
        slurm, hosts = (shlex.quote(f"{output}/{name}") for name in ("slurm.sbatch", "launch-hosts.sh"))
        return f"sbatch {slurm}, or {hosts} HOST ..."
    return f"{shlex.quote(f'{output}/launch.sh')}, or toolkit train {shlex.join(arguments)}"


def explained(resolved: Resolved) -> list[str]:
    """A line per decision: key, value, reason, in columns."""
    rows = [(decision.key, _shown(decision.value), decision.reason) for decision in resolved.decisions]
    width, value_width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [f"{key:<{width}}  {value:<{value_width}}  {reason}" for key, value, reason in rows]


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
