"""YAML with positions: line and column of every value, duplicate keys rejected, YAML 1.2 numbers.

PyYAML follows YAML 1.1, where ``1e-4`` is a string and ``no`` a boolean; a recipe follows YAML 1.2's core schema
(https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError, Place

KeyPath = tuple[str | int, ...]

_BaseLoader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _CoreLoader(_BaseLoader):  # the base is chosen at run time: C where it is built
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  # PyYAML's own protocol


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _core_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _core_int)


@dataclass
class Document:
    """A parsed file: plain Python values, and the place of each key path."""

    file: str
    value: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """The place of ``path``, or of its nearest parent in the file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.file))


def parse(text: str, file: str) -> Document:
    """Parse one YAML document; raises InputError with the line of a syntax error."""
    loader = _CoreLoader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(file, mark.line + 1, mark.column + 1) if mark else Place(file)
        raise InputError.at(place, None, f"not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError.at(Place(file), None, f"not valid YAML: {error}") from None
    finally:
        loader.dispose()
    document = Document(file, value)
    if node is not None:
        _note_places(node, (), document, set())
    return document


def _note_places(node: yaml.Node, path: KeyPath, document: Document, inside: set[int]) -> None:
    document.places.setdefault(path, _place(node, document.file))
    if id(node) in inside:
        raise InputError.at(_place(node, document.file), None, "an anchor contains itself")
    inside = inside | {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, Place] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            place = _place(key_node, document.file)
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError.at(place, None, "a key must be plain text")
            if key in seen:
                raise InputError.at(place, key, f"duplicate key; the first is in line {seen[key].line}")
            seen[key] = place
            document.places[(*path, key)] = place
            _note_places(value_node, (*path, key), document, inside)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_places(item, (*path, index), document, inside)


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)


def read(file: str | Path) -> Document:
    """Parse a file; raises InputError if it cannot be read."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError.at(Place(file), None, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError.at(Place(file), None, f"not UTF-8 text (byte {error.start})") from None
    return parse(text, str(file))
