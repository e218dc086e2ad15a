"""A recipe under construction, and the record of every key that it is made from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import InputError, Place
from toolkit.importing.outcome import Key, Outcome


@dataclass(frozen=True)
class Written:
    """A key as a file has it. ``known`` is False where a shell variable holds the value."""

    value: Any
    place: Place
    known: bool = True


@dataclass
class Draft:
    """What is read of the source, and what is decided about it.

    ``own_names``: the tool's names for keys of the transformers Trainer, so that one reader serves several tools.
    """

    written: dict[str, Written]
    defaults: Mapping[str, Any]
    version: str
    own_names: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys that the user gave on the command line: they settle what the files leave open."""
    command: str | None = None
    """The tool's subcommand (sft, pt, rlhf), where a script names it."""
    launcher_amp: str | None = None
    """Mixed precision of the launch files: it holds where the arguments name none."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def name(self, key: str) -> str:
        """The tool's own name of a key."""
        return self.own_names.get(key, key)

    def has(self, key: str) -> bool:
        """Whether a file has the key, with a value that is known."""
        found = self.written.get(self.name(key))
        return found is not None and found.known

    def get(self, key: str, default: Any = None) -> Any:
        """The value: from the file, else the tool's default, else ``default``."""
        name = self.name(key)
        if self.has(key):
            return self.written[name].value
        return self.defaults.get(name, default)

    def active(self, key: str) -> bool:
        """Whether a switch is on."""
        value = self.get(key)
        return value.lower() == "true" if isinstance(value, str) else bool(value)

    def number(self, key: str, default: float | None = None) -> float:
        """The value as a number; YAML 1.1 reads ``1e-4`` as text. Raises InputError where it is none."""
        value = self.get(key)
        value = default if value in (None, "") else value
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            found = float(value)
            if not math.isfinite(found):
                raise ValueError
            return found
        except (ValueError, OverflowError):
            raise InputError.at(self.place(key), self.name(key), f"{value!r} is not a number") from None

    def whole(self, key: str, default: int | None = None) -> int:
        """The value as a whole number; raises InputError where it is none."""
        value = self.number(key, default)
        if value != int(value):
            raise InputError.at(self.place(key), self.name(key), f"{value!r} is not a whole number")
        return int(value)

    def names(self, key: str) -> list[str]:
        """The value as names, also a text with commas; empty where there is none. Raises InputError for other."""
        value = self.get(key)
        if value is None or isinstance(value, str):
            return [part.strip() for part in (value or "").split(",") if part.strip()]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError.at(self.place(key), self.name(key), "expected names")
        return value

    def mappings(self, key: str) -> list[dict[str, Any]]:
        """The value as a list of mappings; empty where there is none. Raises InputError for other values."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise InputError.at(self.place(key), self.name(key), "expected a list of mappings")
        return value

    def place(self, key: str) -> Place | None:
        """Where the key is written; None for a default."""
        found = self.written.get(self.name(key))
        return found.place if found else None

    def done(self, key: str) -> bool:
        """Whether the key's outcome is decided."""
        return any(found.key == self.name(key) for found in self.keys)

    def set(self, recipe_key: str, value: Any, origin: str) -> None:
        """Set a key of the recipe; ``origin`` becomes its comment."""
        self.values[recipe_key] = value
        self.origins[recipe_key] = origin

    def carry(self, key: str, recipe_key: str, value: Any, how: str = "") -> None:
        """The key becomes a key of the recipe. ``how``: the conversion, if there is one."""
        place = self.place(key)
        where = (
            f"{place.file}:{place.line} {self.name(key)}" if place else f"default of {self.version}: {self.name(key)}"
        )
        self.set(recipe_key, value, f"{where}{': ' if how else ''}{how}")
        self._record(key, "carried", how, recipe_key)

    def ignore(self, key: str, reason: str) -> None:
        """The key does not change what is trained, unless its outcome is decided already. Defaults are not listed."""
        if self.place(key) is not None and not self.done(key):
            self._record(key, "no-effect", reason)

    def differs(self, key: str, reason: str) -> None:
        """The recipe does, or may do, something else than this key or this default."""
        self._record(key, "differs", reason)

    def unsupported(self, key: str, reason: str) -> None:
        """The recipe has no such thing."""
        self._record(key, "unsupported", reason)

    def block(self, key: str, reason: str) -> None:
        """What remains without this key is another kind of training: no recipe is written."""
        self._record(key, "unsupported", reason)
        self.blocks.append(f"{self.name(key)}: {reason}")

    def _record(self, key: str, outcome: Outcome, reason: str, *recipe_keys: str) -> None:
        name = self.name(key)
        value = self.written[name].value if name in self.written else self.defaults.get(name)
        made = Key(name, value, outcome, self.place(key), recipe_keys, reason)
        earlier = next((found for found in self.keys if found.key == name), None)
        if earlier is None:
            self.keys.append(made)
        else:
            self.keys[self.keys.index(earlier)] = _joined(earlier, made)


def _joined(earlier: Key, later: Key) -> Key:
    """Two decisions about one key: what is lost outweighs what is carried over."""
    first, second = (later, earlier) if later.lost and not earlier.lost else (earlier, later)
    both = first.lost == second.lost and second.reason not in ("", first.reason)
    reason = "; ".join(part for part in (first.reason, second.reason if both else "") if part)
    recipe = tuple(dict.fromkeys((*earlier.recipe, *later.recipe)))
    return Key(first.key, first.value, first.outcome, first.place, recipe, reason)


def model(draft: Draft, *, path: str, revision: str | None = None, attention: str | None = None) -> None:
    """``model.path``, ``model.revision``, ``model.attention`` and ``model.trust_remote_code``."""
    name = draft.get(path)
    if isinstance(name, str) and name:
        draft.carry(path, "model.path", name)
    elif "model.path" not in draft.answers and "model.config" not in draft.answers:
        draft.block(path, "no model; name one on this command line: model.path=...")
    if revision and draft.get(revision) not in (None, "", "main"):
        draft.carry(revision, "model.revision", str(draft.get(revision)))
    elif revision:
        draft.ignore(revision, "the default branch")
    if attention and draft.get(attention) not in (None, "", "auto"):
        draft.carry(attention, "model.attention", str(draft.get(attention)))
    elif attention:
        draft.ignore(attention, "sdpa where the model has it, as in the recipe")
    if draft.active("trust_remote_code"):
        draft.carry("trust_remote_code", "model.trust_remote_code", True)
    draft.ignore("trust_remote_code", "off, as in the recipe")
