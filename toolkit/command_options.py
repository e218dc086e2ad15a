"""One declaration of a command's options: a dataclass, whose fields carry what ``typer`` shows of them. The command
line, the request that the command takes and the parameters of its Python function are made from it.

Every `--help` makes all these classes, so they are declared without what nobody uses and takes long to make:
``@dataclass(eq=False, repr=False)``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import ParameterInfo

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe

    RecipeLike = str | Path | Recipe
    PathLike = str | Path
else:
    RecipeLike = PathLike = str  # on the command line

RECIPE = typer.Argument(metavar="RECIPE", help="the recipe, a YAML file")
OVERRIDES = typer.Argument(metavar="[section.key=value]...", help="override recipe values")
JSON = typer.Option("--json", metavar="FILE", help="write the result as JSON; - for standard output")

P = ParamSpec("P")
Options = TypeVar("Options")
Answer = TypeVar("Answer")


def takes(declared: Callable[P, Options]) -> Callable[[Callable[[Options], Answer]], Callable[P, Answer]]:
    """Give a function of ``declared``, a class of options, these options as its parameters."""

    def decorated(function: Callable[[Options], Answer]) -> Callable[P, Answer]:
        def called(*given: P.args, **named: P.kwargs) -> Answer:
            return function(declared(*given, **named))

        functools.update_wrapper(called, function)
        parameters = [
            parameter.replace(annotation=_without_metadata(parameter.annotation))
            for parameter in inspect.signature(declared).parameters.values()
        ]
        result = function.__annotations__["return"]
        called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": result}
        called.__dict__["__signature__"] = inspect.Signature(parameters, return_annotation=result)
        return called

    return decorated


def _without_metadata(annotation: str) -> str:
    """The type of «Annotated[type, …]»."""
    match ast.parse(annotation, mode="eval").body:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return ast.unparse(kind)
    return annotation


def command_of(function: Callable[[Any], int | None]) -> Callable[..., None]:
    """The command of a function whose parameter is a class of options, for ``typer``. The docstring of the class is the
    command's help. Fields that carry nothing for ``typer`` are not on the command line. The function returns the exit
    status; None: 0."""
    (declared,) = (kind for name, kind in get_type_hints(function).items() if name != "return")
    fields = _fields_of(declared)

    def called(**given: Any) -> None:
        options = declared(**{name: fields[name].read(value) for name, value in given.items()})
        raise typer.Exit(function(options) or 0)

    parameters = [field.parameter(name) for name, field in fields.items()]
    called.__doc__ = declared.__doc__
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    called.__dict__["__signature__"] = inspect.Signature(parameters)
    return called


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field on the command line. ``kind``: its type there; ``default``: of the class; ``read``: makes its value of
    what the command line says."""

    kind: Any
    default: Any
    read: Callable[[Any], Any]

    def parameter(self, name: str) -> inspect.Parameter:
        """For ``typer``. A list is None without values; a flag that turns something off is False without it."""
        default = None if self.default == () else False if self.default is True else self.default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=self.kind)


def _fields_of(declared: Any) -> dict[str, _Field]:
    hints = get_type_hints(declared, include_extras=True)
    fields = {}
    for field in dataclasses.fields(declared):
        kind, *metadata = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else [None]
        shown = next((one for one in metadata if isinstance(one, ParameterInfo)), None)
        if shown is not None:
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            kind, read = _on_command_line(kind, default, metadata)
            fields[field.name] = _Field(Annotated[kind, shown], default, read)
    return fields


def _on_command_line(kind: Any, default: Any, metadata: Sequence[Any]) -> tuple[Any, Callable[[Any], Any]]:
    """The type of an option there, and what makes the field's value of it."""
    if parted in metadata:
        return str | None, parted
    if get_origin(kind) is Sequence:
        several: Any = list[get_args(kind)[0]]  # type: ignore[misc]
        return several if default is inspect.Parameter.empty else several | None, lambda given: tuple(given or ())
    return kind, operator.not_ if default is True else lambda given: given


def parted(text: str | None) -> tuple[str, ...]:
    """The parts of «a,b». In the metadata of an option: several values with commas, not the option several times."""
    return tuple(part for part in (text or "").split(",") if part)
