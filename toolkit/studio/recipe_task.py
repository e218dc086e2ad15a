"""A recipe's text with changes from the form: its mistakes by line, its values, derived values and launch files."""

from __future__ import annotations

import json
import re
from typing import Any

from toolkit.errors import InputError
from toolkit.launch.files import launch_files
from toolkit.recipe.load import validate
from toolkit.recipe.positions import parse
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.studio.edit import FILE, REMOVED, Change, edited, read_mapping
from toolkit.studio.form import NONE, empty_options, leaders, read, written
from toolkit.studio.worker import Settings

FOR_A_PLAN = "fine for a plan, not for fine-tuning. Set a model: a hub id or a folder."
LAUNCH = "launch"
"""The folder of the launch files in the archive: `toolkit config recipe.yaml -o launch` writes the same."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_PLACED = re.compile(rf"{re.escape(FILE)}:(\d+)(?::\d+)?: ")


def recipe(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """``text``, ``edits`` ([key, value as text or None]), ``as_text`` (keys whose values are text, not YAML)."""
    text = edited(arguments["text"], [_change(key, value, arguments["as_text"]) for key, value in arguments["edits"]])
    answer: dict[str, Any] = {"text": text, "problems": [], "set": {}, "decisions": [], "files": {}, "model": None,
                              "empty": {}, "note": ""}  # fmt: skip
    answer["total"] = ""
    try:
        values = read_mapping(text)
        answer["set"], answer["empty"] = _flat(values) | written(values), empty_options(values)
        checked = checked_recipe(text, settings)
        answer["model"] = [checked.model.path, checked.model.revision]
        resolved = resolve(checked, FILE, device=_device(checked))
        answer["decisions"] = [[d.key, _shown(d.value), d.reason] for d in resolved.decisions]
        answer["files"] = archive(resolved, text)
        if checked.model.config is not None:
            bare = "" if checked.tokenizer.path else ", and no tokenizer"
            answer["note"] = f"Random weights (model.config){bare}: {FOR_A_PLAN}"
        answer["total"] = f"{checked.strategy.name}, {resolved.world_size} × {resolved.device}"
    except InputError as error:
        answer["problems"] = [placed(problem) for problem in error.problems]
    return answer


def checked_recipe(text: str, settings: Settings) -> Recipe:
    """The validated recipe. Raises InputError, also for what Studio does not do with a recipe."""
    read_mapping(text)
    found = validate(parse(text, FILE))
    if found.model.trust_remote_code:
        raise InputError(f"{FILE}: model.trust_remote_code: studio runs no code of a model; use toolkit plan")
    if settings.public:
        _refuse_files(found)
    return found


def _refuse_files(found: Recipe) -> None:
    if found.model.path is not None and not _HUB_ID.fullmatch(found.model.path):
        raise InputError(f"{FILE}: model.path: this server reads no folders; use a hub id, or paste a config")
    if found.adapter is not None and found.adapter.path is not None:
        raise InputError(f"{FILE}: adapter.path: this server reads no adapters; remove the key to plan")


def archive(resolved: Resolved, text: str) -> dict[str, str]:
    """The recipe and its launch files, by their path in the archive."""
    files = launch_files(resolved, LAUNCH, FILE)
    return {FILE: text, **{f"{LAUNCH}/{name}": content for name, content in files.items()}}


def placed(problem: str) -> dict[str, Any]:
    """A message with its line apart."""
    match = _PLACED.match(problem)
    line = int(match.group(1)) if match else None
    message = problem[match.end() :] if match else problem.removeprefix(f"{FILE}: ")
    return {"line": line, "message": message}


def _device(checked: Recipe) -> str | None:
    """Files for a GPU are written on a machine without one too."""
    return "cpu" if checked.machine.device == "cpu" else "cuda"


def _change(key: str, value: str | None, as_text: list[str]) -> Change:
    section = leaders().get(key)
    if section is not None and value == NONE:
        return section, REMOVED
    if value is None or not value.strip():
        return key, REMOVED
    if (several := read(key, value, read_value)) is not NotImplemented:
        return key, several
    # A field of text may also take a list, as data.train does; nothing else begins like one.
    if key in as_text and not value.lstrip().startswith(("[", "{")):
        return key, value
    return key, read_value(value)


def read_value(text: str) -> Any:
    """A form's text as YAML; text that is no YAML is kept as text, and the schema says what is wrong with it."""
    try:
        read_mapping(f"value: {text}\n")
        return parse(text, "value").value
    except InputError:
        return text


def _flat(values: dict[str, Any], before: str = "") -> dict[str, str]:
    """``{"batch": {"micro_size": 2}}`` as ``{"batch.micro_size": "2"}``; a section is there too, as JSON."""
    found: dict[str, str] = {}
    for key, value in values.items():
        path = f"{before}{key}"
        found[path] = value if isinstance(value, str) else json.dumps(value, default=str)
        if isinstance(value, dict):
            found |= _flat(value, f"{path}.")
    return found


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
