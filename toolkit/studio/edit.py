"""Sets keys in a recipe's text; its comments and order do not change where the place can be edited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from toolkit.errors import InputError
from toolkit.linting.edits import add, apply, remove, render, set_value
from toolkit.linting.files.tree import Source
from toolkit.linting.files.yaml_reader import parse_yaml
from toolkit.linting.model import Edit, Setting
from toolkit.recipe.positions import parse

FILE = "recipe.yaml"
Change = tuple[str, Any]
"""A key with dots, and its new value; ``REMOVED``: the key goes."""


class Removed:
    """The type of ``REMOVED``."""


REMOVED = Removed()


def read_mapping(text: str) -> dict[str, Any]:
    """A recipe's values, not yet validated. Raises InputError for what is no mapping, too deep, or an alias bomb."""
    parse_yaml(text, FILE)  # has limits on depth and on repeated aliases
    value = parse(text, FILE).value
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{FILE}:1: expected a mapping with the sections model, data, run, ...")
    return value


def edited(text: str, changes: Sequence[Change]) -> str:
    """The text with every change made, one after the other. Raises InputError if it is no mapping."""
    for key, value in changes:
        wanted = read_mapping(text)
        _put(wanted, key.split("."), value)
        made = _in_place(text, key, value)
        # What was written must mean what was wanted; else the whole is written anew, without comments.
        text = made if made is not None and _means(made, wanted) else _dumped(wanted)
    return text


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    inner = values
    for part in path[:-1]:
        found = inner.get(part)
        if not isinstance(found, dict):
            if value is REMOVED:
                return
            found = inner[part] = {}
        inner = found
    if value is REMOVED:
        inner.pop(path[-1], None)
    else:
        inner[path[-1]] = value


def _means(text: str, wanted: dict[str, Any]) -> bool:
    try:
        return read_mapping(text) == wanted
    except InputError:
        return False


class _Dumper(yaml.SafeDumper):
    """PyYAML writes YAML 1.1, where ``1e3`` is text; recipes are YAML 1.2, where it is a number."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if _is_plain(value) else '"')


_Dumper.add_representer(str, _text)


def _is_plain(value: str) -> bool:
    """Whether PyYAML's way to write a text reads as that text."""
    try:
        return parse(yaml.safe_dump(value), "value").value == value
    except InputError:
        return False


def _dumped(values: dict[str, Any]) -> str:
    if not values:
        return ""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _simple(value: Any) -> bool:
    return not isinstance(value, str) or _is_plain(value)


def _in_place(text: str, key: str, value: Any) -> str | None:
    source = Source(FILE, "args", text, parse_yaml(text, FILE), "yaml")
    section, _, name = key.rpartition(".")
    entry = source.entry(key)
    if entry is not None:
        setting = Setting(source, key, entry)
        if value is REMOVED:
            fix = remove(setting)
        elif entry.node.entries is not None or entry.node.items is not None or not _simple(value):
            edit = Edit(FILE, entry.node.start, entry.node.end, json.dumps(value))
            return apply(text, [edit])
        else:
            fix = set_value(setting, value)
    elif value is REMOVED:
        return text
    elif section and source.entry(section) is None and "." not in section:
        shown = render({name: value}, "yaml") if isinstance(value, dict) else f"{{{name}: {render(value, 'yaml')}}}"
        ending = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{ending}{section}: {shown}\n"
    else:
        fix = add(source, section, name, value)
    return None if fix is None else apply(text, list(fix.edits))
