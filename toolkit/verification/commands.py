"""The command line of `toolkit verify`. Imports nothing heavy before it runs."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command(name="verify")(verify_command)


def verify_command(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="in place of the file's")
    ] = None,
    fault: Annotated[str | None, typer.Option("--fault", metavar="ID", help="inject one known fault")] = None,
    kill_matrix: Annotated[
        bool, typer.Option("--kill-matrix", help="every fault under every strategy; -o FILE writes it as Markdown")
    ] = False,
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="DIR", help="a loop of your own, recorded, in place of a recipe")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="the report; by default runs/verify/RECIPE.html"),
    ] = None,
    full_size: Annotated[bool, typer.Option("--full-size", help="the model itself, not its twin")] = False,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="the result, - for standard output")
    ] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", metavar="SECONDS", help="per pass")] = 300.0,
) -> None:
    """Prove the recipe equal to a plain loop, or say where it first differs."""
    from toolkit.errors import InputError
    from toolkit.verification.command import run_command, run_matrix, run_trace

    if trace is not None and output is not None:
        raise InputError("toolkit verify: --output: a trace has no report to write; --json FILE writes its result")
    if trace is not None:
        raise typer.Exit(run_trace(trace, json_target))
    if recipe is None:
        raise InputError("toolkit verify: give a recipe, or --trace DIR")
    if kill_matrix:
        code = run_matrix(recipe, overrides or [], fault, json_target, time_limit, output)
    else:
        code = run_command(recipe, overrides or [], fault, full_size, json_target, time_limit, output)
    raise typer.Exit(code)
