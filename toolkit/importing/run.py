"""`import_config`: from the files of another tool to a recipe, with what became of every key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.command_line import OVERRIDE
from toolkit.errors import InputError, Place
from toolkit.importing.axolotl import AXOLOTL
from toolkit.importing.draft import Draft
from toolkit.importing.kernels import leave_out
from toolkit.importing.launching import Launch
from toolkit.importing.llamafactory import LLAMAFACTORY
from toolkit.importing.loops import plan_note
from toolkit.importing.outcome import Key
from toolkit.importing.scripts import SCRIPTS
from toolkit.importing.sources import EXPECTED, Subject, find
from toolkit.importing.swift import SWIFT
from toolkit.importing.table import Table, apply
from toolkit.importing.torchtune import TORCHTUNE
from toolkit.importing.trl import TRL
from toolkit.importing.write import nested, recipe_text
from toolkit.linting.files.tools import BY_ID
from toolkit.linting.output.machine import envelope
from toolkit.recipe.load import apply_overrides, recipe_sha256, validate
from toolkit.recipe.positions import Document, parse
from toolkit.recipe.schema import Recipe

TABLES = {table.id: table for table in (AXOLOTL, LLAMAFACTORY, SWIFT, TORCHTUNE, TRL, SCRIPTS)}
"""The tools whose files can be imported, by the names that the readers of `toolkit lint` give them."""


def table_for(tool: str, path: str) -> Table:
    """The table of a tool; raises InputError for a tool that is recognised and not imported."""
    found = TABLES.get(tool)
    if found is None:
        known = ", ".join(table.name for table in TABLES.values())
        name = BY_ID[tool].name if tool in BY_ID else tool
        raise InputError.at(Place(path), None, f"a file of {name}, which cannot be imported; can be: {known}")
    return found


@dataclass(frozen=True)
class Imported:
    """The result of `toolkit import`."""

    source: str
    tool: str
    version: str
    keys: tuple[Key, ...]
    """What became of every key of the files, and of every default of the tool that decides about training."""
    notes: tuple[str, ...]
    text: str | None
    """The recipe as YAML with comments; None if what remains would be another kind of training."""
    recipe: Recipe | None = None
    blocks: tuple[str, ...] = ()
    """Why there is no recipe."""
    started: float = field(default_factory=time.time)

    @property
    def lost(self) -> tuple[Key, ...]:
        """The keys because of which the recipe does not train the same."""
        return tuple(key for key in self.keys if key.lost)

    @property
    def exit_code(self) -> int:
        """0: everything that decides about training is carried over; 1: not everything."""
        return int(bool(self.lost or self.blocks))

    def to_json(self) -> dict[str, Any]:
        """The result as `toolkit import --json` writes it."""
        return envelope("import", self.started) | {
            "recipe_sha256": recipe_sha256(self.recipe) if self.recipe else None,
            "source": self.source,
            "tool": self.tool,
            "tool_version": self.version,
            "same": self.exit_code == 0,
            "keys": [key.to_json() for key in self.keys],
            "notes": list(self.notes),
            "blocks": list(self.blocks),
            "recipe": self.text,
        }


def import_config(paths: Sequence[str], overrides: Sequence[str] = ()) -> Imported:
    """Read a training configuration of another tool, with its launch files.

    ``overrides``: ``section.key=value`` of the recipe, which settle what the files leave open.
    Raises InputError if the files cannot be used.
    """
    started = time.time()
    if not paths:
        raise InputError(f"no file to import; expected {EXPECTED}")
    given = _answers(overrides)
    subject = find(list(paths))
    table = table_for(subject.tool, subject.path)
    draft = table.draft(subject.written)
    draft.answers = given
    draft.command = subject.command
    launch = Launch(draft)
    launch.read(subject.beside)
    draft.launcher_amp = launch.amp
    apply(draft, table)
    _variables(draft, subject)
    for key, value in given.items():
        before = draft.values.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = before | value
        draft.set(key, value, "the command line")
    return _finished(draft, table, subject, started)


def _finished(draft: Draft, table: Table, subject: Subject, started: float) -> Imported:
    recipe = None
    if not draft.blocks:
        recipe = _checked(draft)
        _about_the_folder(draft)
        draft.notes.insert(0, plan_note(draft, table))
    text = None if draft.blocks else recipe_text(draft, subject.path, table.name)
    if text is not None:
        recipe = validate(parse(text, "the imported recipe"))
    order = sorted(range(len(draft.keys)), key=lambda at: (draft.keys[at].place is None, _line(draft.keys[at]), at))
    keys = tuple(draft.keys[at] for at in order)
    return Imported(
        subject.path, table.name, table.version, keys, tuple(draft.notes), text, recipe, tuple(draft.blocks), started
    )


def _line(key: Key) -> tuple[str, int]:
    return (str(key.place.file), key.place.line or 0) if key.place else ("", 0)


def _checked(draft: Draft) -> Recipe | None:
    """The recipe, resolved as a run would; what contradicts itself becomes a reason to write none."""
    from toolkit.strategies import resolve

    try:
        recipe = validate(Document("the imported recipe", nested(draft.values)))
        device = "cpu" if recipe.machine.device == "cpu" else "cuda"
        resolve(_with_a_known_model(recipe, draft), "the imported recipe", device=device)
    except InputError as error:
        if leave_out(draft, error.problems):
            return _checked(draft)
        draft.blocks.extend(error.problems)
        return None
    return recipe


def _about_the_folder(draft: Draft) -> None:
    """A run needs a folder of its own; the tool's earlier runs may be in the one that its file names."""
    folder = Path(str(draft.values.get("run.output_dir", "")))
    if "run.output_dir" in draft.values and folder.is_dir() and any(folder.iterdir()):
        draft.notes.append(f"{folder} contains files; train with run.output_dir=NEW")


def _with_a_known_model(recipe: Recipe, draft: Draft) -> Recipe:
    """The recipe, with a stand-in where the model's config cannot be read here."""
    from toolkit.recipe.model_facts import model_facts

    try:
        facts = model_facts(recipe.model)
        if facts.config is not None:
            return recipe
        why = facts.why_unknown or "its config is not known"
    except ValueError as error:  # a name that the hub does not allow
        why = str(error).splitlines()[0]
    except InputError as error:
        why = error.problems[0].removeprefix("model.path: ")
    draft.notes.append(f"checked without the model: {why}")
    config: dict[str, Any] = {"model_type": "llama"}
    if (mesh := recipe.strategy.mesh) is not None:  # of which every number divides the heads
        config["num_attention_heads"] = mesh.tensor * mesh.context
    stand_in = recipe.model.model_copy(update={"path": None, "config": config})
    return recipe.model_copy(update={"model": stand_in})


def _answers(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of the command line by key; raises InputError for what no recipe can have."""
    whole = parse('{"model": {"path": "any"}, "data": {"train": "any"}}', "recipe")
    apply_overrides(whole, overrides)
    try:
        validate(whole)
    except InputError as error:
        if own := [problem for problem in error.problems if problem.startswith(f"{OVERRIDE} ")]:
            raise InputError(*own) from None
    document = parse("{}", "overrides")
    apply_overrides(document, overrides)
    found: dict[str, Any] = {}
    for override in overrides:
        parts = override.partition("=")[0].split(".")[:2]  # a draft has sections and their keys: strategy.mesh is one
        value: Any = document.value
        for part in parts:
            value = value[part]
        found[".".join(parts)] = value
    return found


def _variables(draft: Draft, subject: Subject) -> None:
    if subject.open is not None:
        draft.keys.append(Key("$...", None, "unknown", subject.open, (), "a shell variable may hold further arguments"))
