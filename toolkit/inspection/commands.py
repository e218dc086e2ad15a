"""`toolkit data`, declared without importing anything heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import typer

from toolkit.options import JSON, OVERRIDES, RECIPE, RecipeLike, command_of


@dataclass(frozen=True)
class DataOptions:
    """What is read and shown of the data."""

    recipe: Annotated[RecipeLike, RECIPE]
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    _: KW_ONLY
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="show the first N samples (or rows)")] = 3
    only: Annotated[
        Literal["cut", "unsupervised", "duplicate"] | None,
        typer.Option("--only", metavar="KIND", parser=str, help="show only these: cut, unsupervised or duplicate"),
    ] = None
    evaluation: Annotated[bool, typer.Option("--eval", help="data.eval instead of data.train")] = False
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="read only the first N rows of each source")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Request(DataOptions):
    """The command line: also how much the screen shows, and what is written."""

    full: Annotated[bool, typer.Option("--full", help="show long samples from end to end")] = False
    tokens: Annotated[bool, typer.Option("--tokens", help="show where each token ends")] = False
    page: Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page")] = None
    json_target: Annotated[str | None, JSON] = None


@command_of(Request)
def data(request: Request) -> int:
    """Show the samples as the model sees them. Also lengths, duplicates, and what padding costs."""
    from toolkit.inspection.command import data_command

    return data_command(request)
