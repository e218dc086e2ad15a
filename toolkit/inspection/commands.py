"""`toolkit data`, declared without importing anything heavy."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the toolkit's."""
    app.command()(data)


def data(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.key=value]...", help="override recipe values")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="show the first N samples (or rows)")] = 3,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="KIND", help="show only these: cut, unsupervised or duplicate"),
    ] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="data.eval instead of data.train")] = False,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="read only the first N rows of each source")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="show long samples from end to end")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="show where each token ends")] = False,
    page: Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page")] = None,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    ] = None,
) -> None:
    """Show the samples as the model sees them. Also lengths, duplicates, and what padding costs."""
    from toolkit.inspection.command import Request, data_command

    request = Request(recipe, tuple(overrides or ()), samples, only, evaluation, rows, full, tokens, page, json_target)
    raise typer.Exit(data_command(request))
