"""The form of a recipe, from the recipe's own schema: a new key has its field without a change here."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.recipe.json_schema import recipe_schema
from toolkit.recipe.schema import Recipe

Kind = Literal["choice", "number", "text", "long", "list", "sets"]
"""Of a field. ``list``: one entry a line. ``sets``: one text, or a line ``name: text`` for each of several."""

# What decides about memory and speed, and what a newcomer sets; the rest is below, by section.
BASICS = (
    "model.path", "adapter.method", "adapter.r", "data.max_length", "batch.micro_size", "batch.accumulation",
    "precision", "activation_checkpointing", "loss", "optimizer.name", "strategy.name", "strategy.offload",
)  # fmt: skip
_LEADERS = ("adapter.method",)
"""In a section that may be absent: the field that says whether it is there."""
_ELSEWHERE = ("machine.processes",)
"""Beside the device's field."""
NONE = "none"
TITLES = {"general": "Precision, memory, loss", "run": "Run and checkpoints"}


@dataclass(frozen=True)
class Field:
    """``default``: as shown in the empty field; ``long``: YAML of a list or a mapping."""

    key: str
    kind: Kind
    default: str
    help: str
    choices: tuple[str, ...] = ()
    whole: bool = False
    as_text: bool = False
    """The value is text whatever it looks like, but for a list or a mapping."""
    leads: str | None = None
    """The section that is there or not, as this field says: ``NONE`` removes it whole."""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class Group:
    """Fields under a title."""

    name: str
    title: str
    fields: tuple[Field, ...]


def form() -> list[Group]:
    """The basics, then every section with its other keys."""
    fields = {field.key: field for field in _fields()}
    groups: dict[str, list[Field]] = {}
    for key, field in fields.items():
        if key not in BASICS and key not in _ELSEWHERE:
            groups.setdefault(key.partition(".")[0] if "." in key else "general", []).append(field)
    basics = tuple(fields[key] for key in BASICS if key in fields)
    rest = [Group(name, TITLES.get(name, name.capitalize()), tuple(inner)) for name, inner in groups.items()]
    return [Group("basics", "Basics", basics), *rest]


def leaders() -> dict[str, str]:
    """Sections that may be absent, by the key whose field says whether they are there."""
    return {field.key: field.leads for field in _fields() if field.leads}


def empty_options(values: dict[str, Any]) -> dict[str, str]:
    """What the empty option of a leading field stands for in a recipe with these values: what the recipe then has."""
    return {
        field.key: f"{field.default if isinstance(values.get(field.leads), dict) else NONE} (default)"
        for field in _fields() if field.leads
    }  # fmt: skip


def written(values: dict[str, Any]) -> dict[str, str]:
    """What fields of several lines show of a recipe with these values, by key."""
    found = {}
    for field in _fields():
        value: Any = values
        for part in field.key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if field.kind == "list" and isinstance(value, list):
            found[field.key] = "\n".join(map(_line, value))
        if field.kind == "sets" and isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
            found[field.key] = "\n".join(f"{name}: {one}" for name, one in value.items())
    return found


def read(key: str, text: str, as_yaml: Callable[[str], Any]) -> Any:
    """The value of a field of several lines; ``NotImplemented`` for every other key. ``as_yaml``: reads a list or a
    mapping."""
    kind = next((field.kind for field in _fields() if field.key == key), None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if kind == "sets" and not lines[0].startswith(("[", "{")):
        named = [_NAMED.fullmatch(line) for line in lines]
        return {one[1]: one[2] for one in named if one} if all(named) else "\n".join(lines)
    if kind != "list":
        return NotImplemented
    found = [as_yaml(line) if line.startswith(("[", "{", '"')) else line for line in lines]
    whole = found[0] if len(found) == 1 else None  # YAML of all entries
    return whole if isinstance(whole, list) and not any(isinstance(one, dict) for one in whole) else found


_NAMED = re.compile(r"([A-Za-z0-9_-]+):\s+(\S.*)")


def _line(value: Any) -> str:
    """An entry in one line: as it is, or as JSON where that is not the same text again."""
    plain = isinstance(value, str) and value == value.strip() and value.isprintable()
    return value if plain and value and not value.startswith(("[", "{", '"')) else json.dumps(value, default=str)


def text_keys() -> list[str]:
    """Keys whose values are text, not YAML."""
    return [field.key for field in _fields() if field.as_text]


@functools.cache
def _fields() -> tuple[Field, ...]:
    schema = recipe_schema()
    definitions = schema["$defs"]
    found = []
    for name, part in schema["properties"].items():
        inner = _section(part, definitions)
        annotation = Recipe.model_fields[name]
        if inner is None:
            found.append(_field(name, part, definitions))
            continue
        # A section that may be absent, such as the adapter, sets no default of its own.
        optional = annotation.default is None
        for key, value in inner["properties"].items():
            found.append(_field(f"{name}.{key}", value, definitions, unset=optional))
    return tuple(found)


def _section(part: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    for kind in _kinds(part, definitions):
        if "properties" in kind:
            return kind
    return None


def _kinds(part: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """The types that a value may have, references replaced."""
    found: list[dict[str, Any]] = []
    for kind in part.get("anyOf") or part.get("oneOf") or [part]:
        name = kind.get("$ref", "").rpartition("/")[2]
        whole = definitions[name] | {k: v for k, v in kind.items() if k != "$ref"} if name else kind
        found += _kinds(whole, definitions) if "oneOf" in whole and "properties" not in whole else [whole]
    return found


def _field(key: str, part: dict[str, Any], definitions: dict[str, Any], unset: bool = False) -> Field:
    kinds = [kind for kind in _kinds(part, definitions) if kind.get("type") != "null"]
    choices = tuple(part.get("enum") or next((kind["enum"] for kind in kinds if "enum" in kind), ()))
    types = {kind.get("type") for kind in kinds}
    description = part.get("description", "")
    leads = key.partition(".")[0] if unset and key in _LEADERS else None
    default = "" if unset and leads is None else _default(part)
    if types == {"boolean"}:
        return Field(key, "choice", default, description, ("true", "false"))
    if choices and all(isinstance(choice, str) for choice in choices):
        return Field(key, "choice", default, description, tuple(choices), as_text=True, leads=leads)
    if types <= {"integer", "number"}:
        return Field(key, "number", default, description, whole=types == {"integer"})
    if types == {"array"} and "string" in {kind.get("type") for kind in _kinds(kinds[0].get("items", {}), definitions)}:
        return Field(key, "list", default, description)
    if any("patternProperties" in kind for kind in kinds) and "string" in types:
        return Field(key, "sets", default, description)
    as_text = types <= {"string", "array", "object"} and "string" in types
    return Field(key, "text" if "string" in types else "long", default, description, as_text=as_text)


def _default(part: dict[str, Any]) -> str:
    value = part.get("default")
    if value is None or value in ({}, []):
        return ""
    return value if isinstance(value, str) else json.dumps(value)
