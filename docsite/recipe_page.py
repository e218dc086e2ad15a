"""Generates docs/recipe.md from the schema: ``python -m docsite.recipe_page > docs/recipe.md``."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from toolkit.layouts import layouts
from toolkit.optimizers import optimizer_names
from toolkit.recipe.adapter_methods import list_methods, method_names
from toolkit.recipe.known_names import list_tasks
from toolkit.recipe.optimizer_names import list_optimizers
from toolkit.recipe.schema import MeshAxes, Recipe
from toolkit.recipe.strategy_names import list_names, strategy_names
from toolkit.rooms import all_options
from toolkit.tasks import task_names

_LISTS = (
    (list_names, strategy_names),
    (list_tasks, task_names),
    (list_optimizers, optimizer_names),
    (list_methods, method_names),
)

_HEAD = """\
# The recipe

Every key, its type and its default, generated from the schema. Unknown keys are errors with their line and a «did you
mean». Types are strict. Any value can be overridden on the command line with `section.key=value`.
"""


def reference() -> str:
    """The page, a table per section."""
    parts = [_HEAD]
    plain = []
    shown: set[type[BaseModel]] = set()
    for name, field in Recipe.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            plain.append((name, field))
            continue
        optional = " (null: none)" if field.default is None else ""
        parts.append(f"## {name}{optional}\n\n{_table(list(section.model_fields.items()))}")
        for key, inner in section.model_fields.items():
            if (listed := _listed(inner.annotation)) is not None and listed in shown:
                continue
            if listed is not None:
                shown.add(listed)
                parts.append(f"### {name}.{key} as a list\n\n{_table(list(listed.model_fields.items()))}")
            elif (nested := _section(inner.annotation)) is not None:
                fields = list(nested.model_fields.items()) + (_other_axes() if nested is MeshAxes else [])
                parts.append(f"### {name}.{key}\n\n{_table(fields)}")
    parts.append(f"## Top-level keys\n\n{_table(plain)}")
    for option in all_options().values():
        if not option.typed_key:
            title = f"{option.title[0].upper()}{option.title[1:]}"
            parts.append(f"### {option.key}\n\n{title}.\n\n{_table(list(option.keys.model_fields.items()))}")
    return "\n".join(parts)


def _other_axes() -> list[tuple[str, Any]]:
    """The axes of a mesh that the schema has no key for."""
    titles = {name: layout.title for name, layout in layouts().items() if name not in MeshAxes.model_fields}
    return [(name, FieldInfo(annotation=int, default=1, description=title)) for name, title in titles.items()]


def _section(annotation: Any) -> type[BaseModel] | None:
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _listed(annotation: Any) -> type[BaseModel] | None:
    """The section that a key takes a list of, if it does."""
    if get_origin(annotation) is list:
        return _section(annotation)
    return next((found for part in get_args(annotation) if (found := _listed(part)) is not None), None)


def _table(fields: list[tuple[str, Any]]) -> str:
    rows = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for name, field in fields:
        default = "required" if field.default is PydanticUndefined else f"`{_shown(field.default)}`"
        shown = _type(field.annotation)
        for extra, names in _LISTS:
            if field.json_schema_extra is extra:
                shown = " \\| ".join(names())
        rows.append(f"| `{name}` | {shown} | {default} | {field.description or ''} |")
    return "\n".join(rows) + "\n"


def _type(annotation: Any) -> str:
    choices = [_shown(choice) for choice in get_args(annotation) if isinstance(choice, str | bool)]
    if choices:
        return " \\| ".join(choices)
    inner = get_args(annotation)
    if type(None) in inner:
        return " or ".join("null" if part is type(None) else _type(part) for part in inner)
    if inner and hasattr(annotation, "__metadata__"):
        return _type(inner[0])
    if get_origin(annotation) is list:
        return f"list of {_type(inner[0])}"
    if get_origin(annotation) is dict:
        return f"dict[{_type(inner[0])}, {_type(inner[1])}]"
    if get_origin(annotation) is not dict and len(inner) > 1:
        return " or ".join(_type(part) for part in inner)
    name = annotation.__name__ if isinstance(annotation, type) and not inner else str(annotation)
    return re.sub(r"typing\.", "", name).replace(" | ", " or ")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


if __name__ == "__main__":
    print(reference(), end="")
