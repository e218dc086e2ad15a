"""`toolkit lint` and `toolkit explain` on the command line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from toolkit.errors import ToolkitError
from toolkit.terminal import coloured, width

FILES = (
    "accelerate YAML, DeepSpeed JSON, training arguments (JSON, YAML or a launch script), PEFT adapter config, "
    "DistributedConfig JSON"
)


Format = Literal["text", "short", "json", "sarif", "github"]
"""Output format of findings."""
Reader = Literal["trainer", "accelerator", "deepspeed"]
"""The program that reads the files."""
Kind = Literal["recipe", "accelerate", "deepspeed", "arguments", "adapter"]
"""A file that `toolkit schema` describes."""


def stop(error: ToolkitError) -> NoReturn:
    """Print the error's lines and exit with its status."""
    for line in str(error).splitlines():
        echo(line, err=True)
    raise typer.Exit(error.exit_code)


def echo(text: str, err: bool = False) -> None:
    """Print text; characters that the terminal's encoding lacks are escaped."""
    stream: Any = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding), err=err)


def _columns() -> int:
    """Text is read best in lines of at most 100 columns."""
    return min(100, width())


def split_codes(values: list[str] | None) -> tuple[str, ...]:
    """Codes given as several options, or as one with commas or spaces."""
    return tuple(code for value in values or () for code in value.replace(",", " ").split())


def lint_command(
    files: Annotated[list[str] | None, typer.Argument(help=FILES, show_default=False)] = None,
    command: Annotated[str | None, typer.Option("--command", "-c", help="a launch command, as one string")] = None,
    reader: Annotated[Reader | None, typer.Option(help="the program that reads the files; default: detected")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="apply safe fixes in place")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="show safe fixes without applying them")] = False,
    select: Annotated[list[str] | None, typer.Option(help="only these codes or code prefixes")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="skip these codes or code prefixes")] = None,
    output: Annotated[Format, typer.Option("--format", help="output format of the findings")] = "text",
    json_file: Annotated[
        str | None, typer.Option("--json", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """Check the files together. Exit 0: clean (notes allowed). 1: findings. 2: a file cannot be used."""
    from toolkit.errors import InputError
    from toolkit.linting import engine
    from toolkit.linting.files.load import load

    started = time.time()
    try:
        if not files and not command:
            raise InputError(f"no files to check; expected {FILES}; or --command 'accelerate launch ...'")
        loaded = load(list(files or ()), command)
        chosen, dropped = split_codes(select), split_codes(ignore)
        if fix or diff:
            report = _fix(loaded, reader, chosen, dropped, write=fix and not diff)
        else:
            report = engine.check(loaded, reader=reader, select=chosen, ignore=dropped)
        _print(report, output, json_file, started)
    except ToolkitError as error:
        stop(error)
    if report.unread:
        stop(InputError(*report.unread))
    raise typer.Exit(1 if report.failed else 0)


def _fix(loaded: Any, reader: Any, select: tuple[str, ...], ignore: tuple[str, ...], write: bool) -> Any:
    from toolkit.linting import fix

    fixed = fix.plan(loaded, reader=reader, select=select, ignore=ignore)
    if write:
        fix.write(fixed)
        for title in fixed.titles:
            echo(f"fixed  {title}", err=True)
    else:
        echo(fix.diff(fixed).rstrip("\n"))
    assert fixed.report is not None
    return fixed.report


def _print(report: Any, output: Format, json_file: str | None, started: float) -> None:
    from toolkit.linting.output import machine, text

    result = json.dumps(machine.as_json(report, started), indent=2) if json_file or output == "json" else ""
    if json_file and json_file != "-":
        write(json_file, result)
    if json_file == "-" or output == "json":
        echo(result)
    elif output == "sarif":
        echo(json.dumps(machine.as_sarif(report), indent=2))
    elif output == "github":
        echo(machine.as_github(report)) if report.findings else None
    else:
        echo(text.show(report, quiet=output == "short", columns=_columns(), colour=coloured(sys.stdout)))


def write(path: str, text: str) -> None:
    from toolkit.errors import InputError, Place

    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError.at(Place(path), None, f"cannot be written: {error.strerror}") from None


def schema_of_file(kind: str, output: str | None) -> None:
    """Print the JSON schema of a configuration file, or write it; raises InputError if it cannot be written."""
    from toolkit.linting.file_schema import file_schema

    text = json.dumps(file_schema(kind), indent=2)
    if output is None:
        echo(text)
    else:
        write(output, text)
        echo(f"wrote {output}")


def explain_command(
    what: Annotated[str, typer.Argument(help="a code such as DS101, or a key such as mixed_precision")],
    files: Annotated[list[str] | None, typer.Argument(help=FILES, show_default=False)] = None,
    command: Annotated[str | None, typer.Option("--command", "-c", help="a launch command, as one string")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """`explain CODE`: the reason and two examples. `explain KEY FILE...`: which layer wins."""
    from toolkit.linting import explain

    started = time.time()
    try:
        if not files and command is None:
            text, result = explain.code(what, _columns())
        else:
            text, result = explain.key(what, list(files or ()), command, _columns())
        if json_file:
            from toolkit.linting.output.machine import envelope

            encoded = json.dumps(envelope("explain", started) | result, indent=2, default=str)
            echo(encoded) if json_file == "-" else write(json_file, encoded)
        if json_file != "-":
            echo(text)
    except ToolkitError as error:
        stop(error)
