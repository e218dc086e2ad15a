"""`toolkit migrate` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import ToolkitError
from toolkit.linting.commands import FILES, echo, stop, write


def migrate_command(
    files: Annotated[list[str], typer.Argument(help=FILES, show_default=False)],
    to: Annotated[str, typer.Option("--to", help="zero1, zero2, zero3 or fsdp2")],
    folder: Annotated[
        str | None, typer.Option("--output", "-o", help="folder for the new files; default: print them")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """Write another strategy's files with the same meaning, or refuse with the reasons."""
    from toolkit.linting.fix import write_whole
    from toolkit.migration.run import migrate

    try:
        made = migrate(files, to)
        if folder is not None:
            _make(folder)
            for name, text in made.files.items():
                write_whole(Path(folder) / name, text)
        if json_file:
            encoded = json.dumps(made.to_json(), indent=2)
            echo(encoded) if json_file == "-" else write(json_file, encoded)
        if json_file != "-":
            for name, text in made.files.items():
                echo(f"wrote {Path(folder) / name}" if folder else f"# {name}\n{text}")
        for note in made.notes:
            echo(f"note  {note}", err=True)
    except ToolkitError as error:
        stop(error)


def _make(folder: str) -> None:
    from toolkit.errors import InputError, Place

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError.at(Place(folder), None, f"cannot be created: {error.strerror}") from None
