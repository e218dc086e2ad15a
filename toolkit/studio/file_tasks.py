"""Configuration files that were pasted or dropped: findings, fixes, another strategy, a recipe."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import RunFailed
from toolkit.studio.worker import Settings

_OTHER = re.compile(r"[^\w.-]+", re.ASCII)


def check(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """The findings of `toolkit lint`, each with its line, and the fixes as a diff."""
    from toolkit.linting import engine
    from toolkit.linting import fix as fixing
    from toolkit.linting.files.load import load
    from toolkit.linting.output.machine import finding_json
    from toolkit.linting.registry import all_rules

    with _written(settings, arguments["files"]) as names:
        report = engine.check(load(names))
        fixed = fixing.plan(load(names)) if any(finding.fix for finding in report.findings) else None
    rules = all_rules()
    return {
        "files": {name: arguments["files"][given] for name, given in zip(names, arguments["files"], strict=True)},
        "findings": [
            finding_json(finding) | {"width": finding.width, "title": rules[finding.code].title}
            for finding in report.findings
        ],
        "unread": report.unread,
        "diff": fixing.diff(fixed) if fixed else "",
        "kinds": sorted({source.kind for source in report.sources}),
    }


def fix(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """The files with every safe fix applied."""
    from toolkit.linting import fix as fixing
    from toolkit.linting.files.load import load

    with _written(settings, arguments["files"]) as names:
        fixed = fixing.plan(load(names))
        return {"files": {name: fixed.after.get(name, "") for name in names}, "titles": fixed.titles}


def explain(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """A rule's reason and examples."""
    from toolkit.linting.explain import code

    return code(arguments["code"])[1]


def migrate(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """The files for another strategy, or why there are none."""
    from toolkit.migration.run import migrate as migrate_files

    with _written(settings, arguments["files"]) as names:
        try:
            made = migrate_files(names, arguments["to"])
        except RunFailed as error:
            return {"files": {}, "notes": str(error).splitlines()}
    return {"files": made.files, "notes": made.notes, "from": made.source, "to": made.target}


def import_config(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """A recipe of another tool's files, and what became of every key."""
    from toolkit.importing.run import import_config as import_files

    with _written(settings, arguments["files"]) as names:
        made = import_files(names)
    return {
        "tool": made.tool,
        "recipe": made.text,
        "blocks": list(made.blocks),
        "notes": list(made.notes),
        "keys": [key.to_json() for key in made.keys],
        "same": made.exit_code == 0,
    }


@contextlib.contextmanager
def _written(settings: Settings, files: dict[str, str]) -> Iterator[list[str]]:
    """The files in a folder of their own, which is the working directory inside; their names there."""
    folder, before = Path(tempfile.mkdtemp(dir=settings.own)), os.getcwd()
    names: list[str] = []
    try:
        os.chdir(folder)
        for given, text in files.items():
            name = _name(given, names)
            (folder / name).write_text(text, encoding="utf-8", newline="")
            names.append(name)
        yield names
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def _name(given: str, taken: list[str]) -> str:
    """A plain file name that is not taken: of the given one, its last part, without unusual characters."""
    last = re.split(r"[/\\]", given)[-1]
    clean = _OTHER.sub("-", last).lstrip(".-")[-80:] or "file"
    name, number = clean, 1
    while name in taken:
        number += 1
        stem, dot, ending = clean.rpartition(".")
        name = f"{stem}-{number}{dot}{ending}" if dot else f"{clean}-{number}"
    return name
