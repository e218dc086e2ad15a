"""Sets keys in a recipe's text; its comments and order do not change where the place can be edited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.errors import InputError
from toolkit.linting.edits import add, apply, remove, set_value
from toolkit.linting.files.tree import Source
from toolkit.linting.files.yaml_reader import parse_yaml
from toolkit.linting.model import Edit, Setting
from toolkit.recipe.positions import parse
from toolkit.recipe.yaml_text import dump, scalar

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
        text = made if made is not None and _means(made, wanted) else (dump(wanted) if wanted else "")
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


def _in_place(text: str, key: str, value: Any) -> str | None:
    source = Source(FILE, "args", text, parse_yaml(text, FILE), "yaml")
    section, _, name = key.rpartition(".")
    entry = source.entry(key)
    if entry is not None:
        setting = Setting(source, key, entry)
        if value is REMOVED:
            fix = remove(setting)
        elif entry.node.entries is not None or entry.node.items is not None:
            edit = Edit(FILE, entry.node.start, entry.node.end, scalar(value))
            return apply(text, [edit])
        else:
            fix = set_value(setting, value)
    elif value is REMOVED:
        return text
    elif section and source.entry(section) is None and "." not in section:
        shown = scalar({name: value})
        ending = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{ending}{section}: {shown}\n"
    else:
        fix = add(source, section, name, value)
    return None if fix is None else apply(text, list(fix.edits))
