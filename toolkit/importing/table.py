"""A tool's keys as a table, and its application to a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.importing.draft import Draft, Written
from toolkit.importing.outcome import Key
from toolkit.linting.near import meant, nearest
from toolkit.rooms import all_options


@dataclass(frozen=True)
class To:
    """The key is a key of the recipe. ``convert`` raises ValueError where the value has no equivalent."""

    recipe: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Nothing:
    """The key does not change what is trained."""

    reason: str


@dataclass(frozen=True)
class Off:
    """The recipe has no such thing; these values turn it off."""

    reason: str
    values: tuple[Any, ...] = (None, False, 0, 0.0, "", "no", "none", "null", [], {})


@dataclass(frozen=True)
class Part:
    """One of several keys that are read together, by a function of ``Table.parts``."""


Rule = To | Nothing | Off | Part


@dataclass(frozen=True)
class Table:
    """A tool: every key that it reads, the defaults that matter, and the functions that read several keys together.

    ``version``: of the tool, whose sources the table was written from. ``former``: names of earlier versions. ``loop``:
    the loop of `toolkit plan` that is the tool's; empty where there is none.
    """

    id: str
    name: str
    version: str
    source: str
    own_rules: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    parts: tuple[Callable[[Draft], None], ...]
    own_names: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, str] = field(default_factory=dict)
    loop: str = "trainer"

    @property
    def rules(self) -> dict[str, Rule]:
        """Its rows, and those that options have for it in their own folders."""
        return {
            **self.own_rules,
            **{key: rule for option in all_options().values() for key, rule in option.names(self.id).items()},
        }

    def draft(self, written: Mapping[str, Written]) -> Draft:
        """An empty draft over what the files have, with names of earlier versions replaced."""
        current = dict(written)
        for old, new in self.former.items():
            if old in current and new not in current:
                current[new] = current.pop(old)
        return Draft(current, self.defaults, self.version, self.own_names)


def words(*texts: str) -> frozenset[str]:
    """The words of the texts."""
    return frozenset(word for text in texts for word in text.split())


def nothing(reason: str, *names: str) -> dict[str, Rule]:
    """A row for each name, of keys that change nothing for one reason."""
    return {name: Nothing(reason) for name in words(*names)}


def off(reason: str, *names: str) -> dict[str, Rule]:
    """A row for each name, of keys that the recipe lacks for one reason."""
    return {name: Off(reason) for name in words(*names)}


def parts(*names: str) -> dict[str, Rule]:
    """A row for each name, of keys that a function of ``Table.parts`` reads."""
    return {name: Part() for name in words(*names)}


def apply(draft: Draft, table: Table) -> None:
    """Decide about every key: first the functions, which read several keys, then the rows."""
    for part in table.parts:
        part(draft)
    rules = table.rules
    for key, rule in rules.items():
        if not draft.done(key):
            _apply(draft, key, rule)
    for key, found in draft.written.items():
        if draft.done(key):
            continue
        if key in rules and not found.known:
            draft.differs(key, "its value is a shell variable that the script does not set")
        elif (of_section := _of_section(key, table)) is not None:
            _apply(draft, key, of_section)
        elif key in rules:
            draft.differs(key, "is not carried over together with the other keys of this file")
        else:
            near = meant(nearest(key, rules))
            draft.keys.append(Key(key, found.value, "unknown", found.place, (), f"unknown to {table.version}{near}"))


def _of_section(key: str, table: Table) -> Rule | None:
    """The rule of a whole section: ``profiler.*`` for ``profiler.enabled``."""
    parts_ = key.split(".")
    names_ = [".".join(parts_[:at]) + ".*" for at in range(len(parts_) - 1, 0, -1)]
    rules = table.rules
    return next((rules[name] for name in names_ if name in rules), None)


def _apply(draft: Draft, key: str, rule: Rule) -> None:
    known = draft.has(key) or (key not in draft.written and key in draft.defaults)
    if isinstance(rule, Nothing):
        draft.ignore(key, rule.reason)
    elif isinstance(rule, Off) and draft.has(key):
        if any(_same(draft.get(key), value) for value in rule.values):
            draft.ignore(key, "this value turns it off")
        else:
            draft.unsupported(key, rule.reason)
    elif isinstance(rule, To) and known:
        value = draft.get(key)
        try:
            draft.carry(key, rule.recipe, rule.convert(value))
        except (ValueError, TypeError) as error:
            draft.differs(key, str(error))


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def number(value: Any) -> float:
    """A number; YAML 1.1 reads ``1e-4`` as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def whole(value: Any) -> int:
    """A whole number."""
    converted = number(value)
    if converted != int(converted):
        raise ValueError(f"{value!r} is not a whole number")
    return int(converted)


def flag(value: Any) -> bool:
    """A truth value, also as text."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)
