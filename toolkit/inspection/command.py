"""`toolkit data`: from the command line to the screen, the page, the JSON and the exit status. Declared without
importing anything heavy."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.command_options import JSON, OVERRIDES, RECIPE, RecipeLike
from toolkit.disk import write_text
from toolkit.errors import InputError
from toolkit.results import Result, write_json

if TYPE_CHECKING:
    from toolkit.inspection.measure import Inspected


@dataclass(eq=False, repr=False)
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


@dataclass(eq=False, repr=False, kw_only=True)
class Request(DataOptions):
    """Show the samples as the model sees them. Also lengths, duplicates, and what padding costs."""

    full: Annotated[bool, typer.Option("--full", help="show long samples from end to end")] = False
    tokens: Annotated[bool, typer.Option("--tokens", help="show where each token ends")] = False
    page: Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page")] = None
    json_target: Annotated[str | None, JSON] = None


def data_command(request: Request) -> int:
    """Inspect and print; returns the exit status. 0: a run reads this data. 2: it would refuse some of it. Raises
    InputError if none of it can be used."""
    found = inspect(request)
    if request.page:
        from toolkit.report.data_page import data_page

        write_text(request.page, data_page(found))
    if request.json_target:
        write_json(found.to_json(), request.json_target)
    if request.json_target != "-":
        from toolkit.inspection.screen import show
        from toolkit.recipe.load import source_of

        show(found, source_of(request.recipe), full=request.full, tokens=request.tokens)
    if found.refused:
        sys.stdout.flush()
        print("\n".join(found.refused), file=sys.stderr)
    return found.exit_code


def inspect(request: DataOptions) -> Inspected:
    """Read the data and measure it. Raises InputError."""
    from toolkit.data.fields import needed_fields
    from toolkit.data.files import local_files
    from toolkit.data.sources import check_local, named_sources
    from toolkit.recipe.load import recipe_from, source_of
    from toolkit.recipe.needs import missing_tokenizer, why_no_tokenizer
    from toolkit.recipe.preflight import check_known
    from toolkit.strategies import resolve

    result = Result("data")
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    recipe = recipe_from(request.recipe, request.overrides)
    source = source_of(request.recipe)
    resolved = resolve(recipe, source, device="cpu" if recipe.machine.device == "cpu" else "cuda")
    notes, recipe = check_known(resolved), resolved.recipe
    if (reason := why_no_tokenizer(recipe) or missing_tokenizer(recipe)) is not None:
        raise InputError(f"{source}: tokenizer.path: {reason}")
    which: Literal["train", "eval"] = "eval" if request.evaluation else "train"
    needed_fields(recipe)
    for one in named_sources(recipe, which):
        if local_files(one.spec, one.key) is not None:
            check_local(one)
    # Two seconds to import: what needs neither is checked before.
    from toolkit.inspection.measure import Inspected, check_asked, measure
    from toolkit.model.processor import load_processor

    only = check_asked(request.samples, request.only, request.rows)

    tokenizer = load_processor(recipe)
    found = measure(resolved, tokenizer, which=which, samples=request.samples, only=only, rows=request.rows)
    fields = found.fields | {"notes": [*notes, *found.fields["notes"]]}
    document = result.finish(recipe_sha256=resolved.sha256, device=None, only=only, **fields)
    return Inspected(document, 2 if document["refused"] else 0, resolved, found.shown, found.arrangements)
