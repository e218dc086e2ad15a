"""Which recipes may resume which checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.earlier import read_earlier
from toolkit.recipe.limits import limits_of
from toolkit.recipe.model_facts import model_facts
from toolkit.recipe.schema import Recipe
from toolkit.rooms import all_options
from toolkit.strategies import strategy_named

FREE: dict[str, set[str] | None] = {
    "strategy": None,
    "machine": None,
    "run": {
        "output_dir",
        "log_every",
        "group_norms",
        "save_every",
        "keep",
        "eval_every",
        "eval_at_start",
        "metric",
        "sample_prompts",
        "sample_max_new_tokens",
        "early_stopping",
        "trackers",
        "on_bad_loss",
        "loss_spike",
        "hang_after",
        "async_save",
    },
    "data": {"workers", "eval", "cache"},
    "batch": {"micro_size", "accumulation", "global_size"},
    "activation_checkpointing": None,
    "compile": None,
    "loss": None,
}
"""What may change on resume, by section (None: all of it): how work is distributed, checked and reported, but not what
is trained; and options that are ``free``. docs/training.md lists it. The global batch, the product of the keys under
``batch``, must not change."""

LENGTH = ("max_steps", "epochs")
"""Keys of ``run`` that may change if the schedule allows it: see toolkit/training/extension.py."""


def identity(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of a recipe that must be equal on resume, including the size of the global batch."""
    kept: dict[str, Any] = {}
    for section, value in recipe.items():
        free = FREE.get(section, set())
        if free is None:
            continue
        kept[section] = {k: v for k, v in value.items() if k not in free} if isinstance(value, dict) else value
    for option in all_options().values():
        if option.free:
            option.remove(kept)
    batch = recipe["batch"]
    parts = strategy_named(recipe["strategy"]["name"]).data_size(Recipe.model_validate(recipe))
    product = (batch["micro_size"] or 1) * (batch["accumulation"] or 1) * parts
    kept["global_size"] = batch["global_size"] or product
    return kept


def saved_recipe(folder: Path, manifest: dict[str, Any]) -> Recipe:
    """The recipe of a valid checkpoint, in the current schema; raises InputError if it cannot be read."""
    file = folder / "recipe.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    return read_earlier(values, manifest.get("recipe_version", 0), file)


def check_recipe(folder: Path, manifest: dict[str, Any], recipe: Recipe, source: str) -> None:
    """Raise InputError with every key of ``recipe`` that prevents resuming the checkpoint in ``folder``.

    ``source``: the recipe's file. Both recipes are compared in the current schema, so a key that the checkpoint's
    version did not have has its default. The length of the run is not compared.
    """
    there, here = (_compared(one) for one in (saved_recipe(folder, manifest), recipe))
    if manifest.get("rows") is not None and all(isinstance(one["data"]["train"], str) for one in (there, here)):
        for one in (there, here):  # its rows are compared: training/same_data.py
            del one["data"]["train"]
    prints = manifest.get("folders", {})
    for section, key in _FOLDERS:
        old, new = ((one.get(section) or {}).get(key) for one in (there, here))
        if not old or not new or old == new:
            continue
        kept = prints.get(f"{section}.{key}")
        if _same_folder(old, new) or (kept is not None and kept == folder_print(new)):
            there[section][key] = new
    if there["data"]["max_length"] != here["data"]["max_length"] and not recipe.data.packing:
        limit = limits_of(recipe, model_facts(recipe.model)).rows
        for one in (there, here):  # earlier versions kept a default beyond the positions; no row was ever longer
            if limit is not None and limit.ends:
                one["data"]["max_length"] = min(one["data"]["max_length"], limit.tokens)
    differences = [*_differences(there, here)]
    if differences:
        raise InputError(
            *(f"{source}: {difference}" for difference in differences),
            f"{folder} was trained with other values. Restore them to resume it, or start a new run in another "
            "run.output_dir. docs/training.md lists what may change on resume",
        )


def other_loss(saved: Recipe, recipe: Recipe) -> str | None:
    """A note where the loss is computed otherwise than when the checkpoint was written; None if it is not."""
    if saved.loss == recipe.loss:
        return None
    how = "the same mathematics in another order, so the run goes on within rounding, not bit for bit"
    return f"loss: {recipe.loss} in place of {saved.loss}: {how}"


def check_newest(run: Path, recipe: Recipe, source: str) -> None:
    """Raise InputError, before any process starts, with every key of ``recipe`` that prevents resuming the newest
    checkpoint of the folder ``run``. What cannot be read is left to the processes, which look for damage."""
    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            saved_recipe(folder, manifest)
        except (OSError, ValueError, AttributeError, InputError):
            continue
        check_recipe(folder, manifest, recipe, source)
        return


_FOLDERS = (("model", "path"), ("tokenizer", "path"), ("adapter", "path"))
_EDGE = 1 << 20
"""Bytes that are read at each end of a file: where a safetensors file has its header and the last of its weights."""


def folder_prints(recipe: Recipe) -> dict[str, str]:
    """What tells the folders that a recipe names from others, by key; without those that are hub ids. A checkpoint
    keeps them, so that a folder that has moved is known again."""
    named = {f"{section}.{key}": getattr(getattr(recipe, section), key, None) for section, key in _FOLDERS}
    found = {name: folder_print(path) for name, path in named.items() if path}
    return {name: value for name, value in found.items() if value is not None}


def folder_print(path: str) -> str | None:
    """A hash of the name, the size and both ends of every file of a folder, hidden ones aside; None where there is no
    such folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(one for one in folder.rglob("*") if one.is_file()):
        name, size = file.relative_to(folder), file.stat().st_size
        if any(part.startswith(".") for part in name.parts):
            continue
        digest.update(f"{name}\0{size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_EDGE))
            if size > _EDGE:
                opened.seek(max(_EDGE, size - _EDGE))
                digest.update(opened.read())
    return digest.hexdigest()


def _same_folder(one: str, other: str) -> bool:
    """Whether two paths name one folder: relative and absolute, with and without ``..``, or by a symbolic link."""
    first, second = (Path(path).expanduser() for path in (one, other))
    try:
        return first.is_dir() and second.is_dir() and first.samefile(second)
    except OSError:
        return False


def _compared(recipe: Recipe) -> dict[str, Any]:
    kept = identity(recipe.model_dump(mode="json"))
    kept["run"] = {key: value for key, value in kept["run"].items() if key not in LENGTH}
    kept["batch.micro_size x batch.accumulation x processes"] = kept.pop("global_size")
    return kept


def _differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{at}.{key}" if at else key)
    elif old != new:
        yield f"{at} (checkpoint: {old!r}, recipe: {new!r})"
