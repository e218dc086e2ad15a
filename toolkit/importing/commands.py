"""`toolkit import` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.errors import ToolkitError
from toolkit.linting.commands import echo, stop, write

if TYPE_CHECKING:
    from toolkit.importing.run import Imported

FILES = "the tool's configuration or launch script, with an accelerate YAML or a DeepSpeed JSON beside it"


def import_command(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE... [section.key=value]...", help=f"{FILES}; overrides settle what they leave open"
        ),
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="the recipe to write; default: print it")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite the recipe")] = False,
    form: Annotated[Literal["text", "json"], typer.Option("--format", help="output format of the report")] = "text",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """Exit 0: everything that decides about training is carried over. 1: not everything. 2: a file cannot be used."""
    from toolkit.command_line import name_overrides
    from toolkit.errors import InputError
    from toolkit.importing.run import import_config

    try:
        if output is not None and Path(output).exists() and not force:
            raise InputError(f"{output}: already exists; --force overwrites it, -o selects another file")
        overrides = [word for word in files if _is_override(word)]
        made = import_config([word for word in files if word not in overrides], overrides)
        if output is not None and made.text is not None:
            write(output, made.text.rstrip("\n"))
        encoded = json.dumps(made.to_json(), indent=2, default=str)
        if json_file and json_file != "-":
            write(json_file, encoded)
        if json_file == "-" or form == "json":
            echo(encoded)
        else:
            _show(made, output)
    except InputError as error:
        stop(InputError(name_overrides(str(error), files)))
    except ToolkitError as error:
        stop(error)
    raise typer.Exit(made.exit_code)


def _is_override(word: str) -> bool:
    return "=" in word and not Path(word).exists()


def _show(made: Imported, output: str | None) -> None:
    if output is None and made.text is not None:
        echo(made.text)
    counts = {name: sum(key.outcome == name for key in made.keys) for name in ("carried", "no-effect")}
    head = "" if made.text is None else f"wrote {output}, " if output else ""
    echo(
        f"{head}{made.tool}: {counts['carried']} keys carried over, {counts['no-effect']} without effect",
        err=not output,
    )
    for note in made.notes:
        echo(f"note  {note}", err=True)
    for key in made.lost:
        echo(f"{key.outcome}  {key.line()}", err=True)
    if made.blocks:
        echo(f"no recipe: what remains is not this training ({'; '.join(made.blocks)})", err=True)
    elif made.lost:
        echo(f"not the same training: {len(made.lost)} {'key' if len(made.lost) == 1 else 'keys'} above", err=True)
