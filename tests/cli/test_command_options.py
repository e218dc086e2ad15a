"""One declaration of options, and what is made of it: the command line, the request, the parameters of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

import toolkit
from toolkit.command_options import OVERRIDES, RECIPE, PathLike, RecipeLike, command_of, parted, takes
from toolkit.errors import InputError
from toolkit.results import write_json


@dataclass(eq=False, repr=False)
class Options:
    recipe: Annotated[RecipeLike, RECIPE]
    overrides: Annotated[Sequence[str], OVERRIDES] = ()
    _: KW_ONLY
    names: Annotated[Sequence[str], typer.Option(help="names"), parted] = ()
    several: Annotated[Sequence[str], typer.Option("--with", help="several times")] = ()
    kind: Annotated[Literal["a", "b"], typer.Option(help="a kind")] = "a"
    cache: Annotated[bool, typer.Option("--no-cache", help="no cache")] = True
    say: Callable[[str], None] = print
    """For Python alone."""


@dataclass(eq=False, repr=False, kw_only=True)
class Request(Options):
    """What the command does. More of it."""

    output: Annotated[PathLike | None, typer.Option("-o", metavar="FILE", help="a file")] = None


def given(*arguments: str) -> dict[str, Any]:
    """The request that a command line makes."""
    seen: list[Request] = []

    def run(request: Request) -> int:
        seen.append(request)
        return 3

    run.__annotations__ = {"request": Request, "return": int}
    app = typer.Typer()
    app.command()(command_of(run))
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 3, done.output
    return {name: value for name, value in vars(seen[0]).items() if name != "say"}


def test_a_command_line_makes_the_request() -> None:
    plain = {
        "recipe": "r.yaml",
        "overrides": (),
        "names": (),
        "several": (),
        "kind": "a",
        "cache": True,
        "output": None,
    }
    assert given("r.yaml") == plain
    words = ["r.yaml", "a=1", "b=2", "--names", "x,,y", "--with", "1,2", "--with", "3", "--kind", "b", "--no-cache"]
    assert given(*words, "-o", "f") == {
        "recipe": "r.yaml", "overrides": ("a=1", "b=2"), "names": ("x", "y"), "several": ("1,2", "3"), "kind": "b",
        "cache": False, "output": "f",
    }  # fmt: skip


def test_the_help_is_that_of_the_class_and_has_what_is_declared() -> None:
    def run(request: Request) -> None: ...

    run.__annotations__ = {"request": Request, "return": None}
    app = typer.Typer(rich_markup_mode=None)
    app.command()(command_of(run))
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "What the command does. More of it." in shown
    assert "--no-cache" in shown
    assert "say" not in shown
    assert CliRunner().invoke(app, ["r.yaml"]).exit_code == 0


def test_a_function_has_the_options_as_its_parameters() -> None:
    @takes(Options)
    def function(options: Options) -> str:
        """What it does."""
        return f"{options.recipe} {options.names}"

    assert function("r", ["a=1"], names=["x"]) == "r ['x']"
    assert function.__doc__ == "What it does."
    signature = inspect.signature(function)
    assert [name for name, one in signature.parameters.items() if one.kind is not one.KEYWORD_ONLY] == [
        "recipe",
        "overrides",
    ]
    assert signature.parameters["names"].annotation == "Sequence[str]"
    assert signature.parameters["cache"].default is True
    with pytest.raises(TypeError, match="nothing"):
        function("r", nothing=1)  # type: ignore[call-arg]


def test_the_python_api_takes_every_option_of_what_it_does() -> None:
    from toolkit.planning.options import PlanOptions

    assert list(inspect.signature(toolkit.plan).parameters) == [field.name for field in fields(PlanOptions)]


def test_a_result_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere/r\.json: cannot be written: No such file or directory"):
        write_json({}, str(tmp_path / "nowhere" / "r.json"))
