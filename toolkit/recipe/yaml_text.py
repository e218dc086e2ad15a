"""YAML that reads as what it was written from, by PyYAML (YAML 1.1, where ``no`` is false) and as a recipe (YAML 1.2,
where ``7e31415``, the beginning of a commit's name, is a number).

PyYAML's own writer quotes what YAML 1.1 would read as something else than text, and nothing more.
"""

from __future__ import annotations

from typing import Any

import yaml

from toolkit.errors import InputError
from toolkit.recipe.positions import parse


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    quoted = "\n" in value or not _is_plain(value)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def _is_plain(value: str) -> bool:
    """Whether PyYAML's way to write a text reads as that text in a recipe."""
    try:
        return parse(yaml.safe_dump(value), "value").value == value
    except InputError:
        return False


def dump(values: Any) -> str:
    """A document in block style, keys in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def scalar(value: Any) -> str:
    """A value in flow style, in one line, keys in their order; inside of a flow collection too, where ``a, b`` would be
    two values."""
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    return text.strip()[1:-1]
