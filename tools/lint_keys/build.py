"""Extracts the keys from the installed packages."""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import types
import typing
from typing import Any

Table = dict[str, dict[str, dict[str, Any]]]  # section -> key -> {types, default, choices}


def table(name: str, sections: Table) -> dict[str, Any]:
    """One package's data file, in a fixed order."""
    ordered = {path: dict(sorted(sections[path].items())) for path in sorted(sections)}
    return {"package": name, "version": importlib.metadata.version(name), "sections": ordered}


def encode(data: dict[str, Any]) -> str:
    """One key a line: a new version's changes read as a short diff."""
    lines = ["{", f' "package": "{data["package"]}",', f' "version": "{data["version"]}",', ' "sections": {']
    sections = list(data["sections"].items())
    for index, (path, keys) in enumerate(sections):
        lines.append(f"  {json.dumps(path)}: {{")
        body = [f"   {json.dumps(key)}: {json.dumps(facts, ensure_ascii=False)}" for key, facts in keys.items()]
        lines.append(",\n".join(body))
        lines.append("  }" + ("," if index < len(sections) - 1 else ""))
    return "\n".join([*lines, " }", "}", ""])


def from_dataclass(cls: Any) -> dict[str, dict[str, Any]]:
    """Keys of a dataclass: its init fields."""
    hints = typing.get_type_hints(cls)
    return {f.name: facts(hints[f.name], _default(f)) for f in dataclasses.fields(cls) if f.init}


def from_pydantic(model: Any) -> dict[str, dict[str, Any]]:
    """Keys of a pydantic model, aliases and the plain names of aliased fields included."""
    found = {}
    for name, field in model.model_fields.items():
        default = field.default if field.default_factory is None and not field.is_required() else None
        entry = facts(field.annotation, default) | _bounds(field.metadata)
        found[field.alias or name] = entry
        if field.alias:
            found[name] = {**entry, "alias_of": field.alias}
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("deprecated"):
            entry["deprecated"] = extra.get("new_param", "")
    return found


def facts(annotation: Any, default: Any = None) -> dict[str, Any]:
    """Types, default and choices of one key, as JSON can hold them."""
    names: set[str] = set()
    choices: set[str] = set()
    for part in _parts(annotation):
        if isinstance(part, type) and issubclass(part, enum.Enum):
            values = [member.value for member in part]
            choices.update(str(value) for value in values)
            names.update(type(value).__name__ for value in values)
        elif typing.get_origin(part) is typing.Literal:
            choices.update(str(value) for value in typing.get_args(part))
            names.update(type(value).__name__ for value in typing.get_args(part))
        else:
            names.add(_type_name(part))
    entry: dict[str, Any] = {"types": sorted(names)}
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, bool | int | float | str | list) and _finite(default):
        entry["default"] = int(default) if type(default) is not bool and isinstance(default, int) else default
    if choices and names <= {"str", "int", "NoneType"}:
        entry["choices"] = sorted(choices)
    return entry


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    """The limits of a pydantic field: ``{"bounds": {"ge": 0}}``."""
    limits = {
        name: getattr(item, name) for item in metadata for name in ("gt", "ge", "lt", "le") if hasattr(item, name)
    }
    return {"bounds": limits} if limits else {}


def _parts(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(annotation) for inner in _parts(part)]
    if origin is typing.Annotated:
        return _parts(typing.get_args(annotation)[0])
    return [annotation]


def _type_name(part: Any) -> str:
    origin = typing.get_origin(part) or part
    name = getattr(origin, "__name__", str(origin))
    if name in ("bool", "int", "float", "str", "dict", "list", "NoneType"):
        return name
    if name in ("Path", "PathLike"):
        return "str"
    if hasattr(origin, "model_fields") or dataclasses.is_dataclass(origin):
        return "dict"
    return "list" if name in ("tuple", "set", "Sequence", "Iterable") else "any"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or value - value == 0
