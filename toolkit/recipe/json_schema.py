"""`toolkit schema`: the JSON schema of the recipe, for editors and other tools.

`toolkit init` writes ``recipe.schema.json`` next to the recipe, which refers to it: editors complete and check the
recipe without a network, and whoever clones the folder gets both files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import toolkit
from toolkit.errors import InputError
from toolkit.optimizers import own_keys
from toolkit.recipe.schema import SCHEDULE_KEYS, Recipe

FILE_NAME = "recipe.schema.json"
# Understood by the YAML language server (VS Code, Neovim, Helix, Emacs) and by JetBrains' editors.
COMMENT = f"# yaml-language-server: $schema={FILE_NAME}\n"
_TITLE = "Recipe of deepspeed-accelerate-toolkit"


def recipe_schema() -> dict[str, Any]:
    """The schema, JSON Schema draft 2020-12: every key with its type, bounds, default and description."""
    schema = Recipe.model_json_schema()
    definitions = schema["$defs"]
    for section in (schema, *definitions.values()):
        for key in section["properties"].values():
            key.pop("title", None)  # pydantic's titles are the key's name again; editors show it already
    definitions["Model"]["oneOf"] = [_given("path", "string"), _given("config", "object")]
    definitions["Optimizer"]["allOf"] = [
        *(_only_for(key, names, "adamw") for key, names in own_keys().items()),
        {
            "if": _both("base_global_batch"),
            "then": {"required": ["lr_scaling"], "properties": {"lr_scaling": {"not": {"const": "none"}}}},
            "else": {"properties": {"lr_scaling": {"const": "none"}}},
        },
    ]
    definitions["ParameterGroup"]["anyOf"] = [_both("lr"), _both("weight_decay")]
    definitions["Schedule"]["not"] = _both("warmup_ratio", "warmup_steps")
    definitions["Schedule"]["allOf"] = [
        *(_only_for(key, names, "cosine") for key, names in SCHEDULE_KEYS.items()),
        {
            "if": {"required": ["name"], "properties": {"name": {"const": "wsd"}}},
            "then": {"oneOf": [_both("decay_ratio"), _both("decay_steps")]},
        },
    ]
    definitions["Run"]["not"] = _both("max_steps", "epochs")
    config = next(kind for kind in definitions["Model"]["properties"]["config"]["anyOf"] if kind["type"] == "object")
    config["required"] = ["model_type"]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": _TITLE}
    return head | {"$comment": f"toolkit schema, version {toolkit.__version__}"} | schema | {"title": _TITLE}


def _given(key: str, kind: str) -> dict[str, Any]:
    return {"required": [key], "properties": {key: {"type": kind}}}


def _only_for(key: str, names: tuple[str, ...], default: str) -> dict[str, Any]:
    """``key`` has a value only where the section's ``name`` is one of ``names``."""
    of_them: dict[str, Any] = {"properties": {"name": {"enum": list(names)}}}
    if default not in names:
        of_them["required"] = ["name"]
    return {"if": of_them, "else": {"properties": {key: {"type": "null"}}}}


def _both(*keys: str) -> dict[str, Any]:
    """Both keys have a value; null is the same as omitting the key."""
    return {"required": list(keys), "properties": {key: {"not": {"type": "null"}} for key in keys}}


def as_text() -> str:
    """The schema as `toolkit schema` prints it, with a final newline."""
    return json.dumps(recipe_schema(), indent=2) + "\n"


def schema_command(output: str | None) -> None:
    """Print the schema, or write it to ``output``; raises InputError if it cannot be written."""
    if output is None:
        print(as_text(), end="")
        return
    write_schema(Path(output))
    print(f"wrote {output}")


def write_schema(target: Path, force: bool = True) -> None:
    """Write the schema to a file. Raises InputError if that fails.

    Without ``force``, an existing file that is not a recipe schema is left alone and is an error.
    """
    if not force and target.exists() and not _is_recipe_schema(target):
        raise InputError(f"{target}: already exists and is not a recipe schema; --force overwrites it")
    try:
        target.write_text(as_text(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None


def _is_recipe_schema(file: Path) -> bool:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("title") == _TITLE
