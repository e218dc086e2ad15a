"""The keys that the packages read, extracted from the packages: one data file per package version.

`python -m tools.lint_keys` writes the files of the installed versions; a test compares them. The check itself
reads only these files and imports none of the packages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

PACKAGES = ("accelerate", "deepspeed", "transformers", "peft", "trl")


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: the types its package accepts, its default, and in which known versions it is."""

    types: tuple[str, ...] = ()
    default: Any = None
    choices: tuple[str, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()  # ("ge", 0): the package rejects what is not
    since: str | None = None  # came with this version; None: in every version we know
    last: str | None = None  # the last version that had it; None: the newest has it


@cache
def package(name: str) -> dict[str, Any]:
    """The newest known version's file of a package, as written by `python -m tools.lint_keys`."""
    return _read(name, versions(name)[-1])


@cache
def versions(name: str) -> tuple[str, ...]:
    """The versions of a package that there is a file for, oldest first."""
    here = (entry.name for entry in files(__name__).iterdir())
    found = [n[len(name) + 1 : -5] for n in here if n.startswith(f"{name}-") and n.endswith(".json")]
    return tuple(sorted(found, key=lambda v: [int(part) for part in v.split(".") if part.isdigit()]))


@cache
def section(name: str, path: str) -> dict[str, Key]:
    """Known keys of a section (``""`` is the top level), those that came or went included."""
    known = versions(name)
    tables = {version: _read(name, version)["sections"].get(path, {}) for version in known}
    merged: dict[str, Key] = {}
    for key in {key for table in tables.values() for key in table}:
        having = [version for version in known if key in tables[version]]
        facts = tables[having[-1]][key]
        merged[key] = Key(
            types=tuple(facts.get("types", ())),
            default=facts.get("default"),
            choices=tuple(facts.get("choices", ())),
            bounds=tuple(facts.get("bounds", {}).items()),
            since=having[0] if having[0] != known[0] else None,
            last=having[-1] if having[-1] != known[-1] else None,
        )
    return merged


@cache
def gone(name: str, path: str) -> dict[str, tuple[str, str]]:
    """Arguments that the newest known version lacks: the last version seen with each, and the next one seen."""
    history = json.loads(files(__name__).joinpath("history.json").read_text(encoding="utf-8"))
    return {key: (last, without) for key, (last, without) in history.get(name, {}).get(path, {}).items()}


@cache
def _read(name: str, version: str) -> dict[str, Any]:
    text = files(__name__).joinpath(f"{name}-{version}.json").read_text(encoding="utf-8")
    return json.loads(text)
