"""Columns of rows and keys of messages that nothing reads: counted by name, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.data.messages import REASONING, recognised, system_column
from toolkit.data.rows import Row
from toolkit.data.turn_marks import MARKS

_SHOWN = 12
"""Names in a note; `toolkit data` lists all."""
_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "images", *REASONING, *MARKS}
_TURN = {"from", "value"}
_OF_ALPACA = ("instruction", "input", "output")
_PREFERENCES = "part of preference data; this task learns from one answer"
_MEDIA = "this task takes text alone; model.task: image-text-to-text reads images"
_OF_A_ROW = "a mark of the whole row: each row counts alike; mark messages with weight: 0, or remove the row"
_CONVERSATION = "data.format: messages reads it"
_WHY = {
    "chosen": _PREFERENCES, "rejected": _PREFERENCES, "label": "a class or a mark of preference data, which this task "
    "does not learn", "images": _MEDIA, "image": _MEDIA, "videos": _MEDIA, "audios": _MEDIA,
    "history": "earlier turns beside Alpaca's instruction are read; beside messages, put them into the messages",
    **dict.fromkeys(MARKS, _OF_A_ROW),
    **dict.fromkeys((*REASONING, "thought", "cot"), "an assistant's message takes it as reasoning_content"),
}  # fmt: skip
"""Why a column is not read that people take to be."""
_WHY_TEXT = _WHY | dict.fromkeys(("system", "system_prompt", "tools", "history"), _CONVERSATION)
_OTHER = "no field of this format"


class Unread:
    """Counts what rows have and a format does not read. ``needed``, ``optional``: as ``canonical_row`` takes them;
    ``template``: the chat template, which may read further keys of messages."""

    def __init__(self, needed: Mapping[str, str], optional: Mapping[str, str], template: str = "") -> None:
        self._needed, self._optional = dict(needed), dict(optional)
        self._words = set(re.findall(r"\w+", template))
        self.rows: dict[str, int] = {}

    def add(self, row: Row) -> None:
        """Count what is not read of one more row. What is null or empty is not counted."""
        for name in self._names(row.value):
            self.rows[name] = self.rows.get(name, 0) + 1

    def add_all(self, rows: Mapping[str, int]) -> None:
        """Count columns of so many rows each."""
        for name, count in rows.items():
            self.rows[name] = self.rows.get(name, 0) + count

    def read(self, value: Mapping[str, Any]) -> set[str]:
        """Names of the columns that are read of a row."""
        if "messages" not in self._needed:
            return set(self._needed.values())
        own, names = self._needed["messages"], self._optional
        kind = recognised(value, own, names)
        found = {names.get("tools", "tools"), names.get("chat_template_kwargs", "chat_template_kwargs")}
        if value.get(names.get("tools", "tools")) is None:
            found.add("functions")
        found |= {names["images"]} if "images" in names else set()
        found |= {name} if (name := system_column(value, names)) is not None else set()
        if kind == "Alpaca":
            return found | {*_OF_ALPACA, names.get("history", "history")}
        if kind == "TRL":
            return found | {names.get("prompt", "prompt"), names.get("completion", "completion")}
        return found | {"conversations" if kind == "ShareGPT" else own}

    def _names(self, value: Mapping[str, Any]) -> Iterator[str]:
        read = self.read(value)
        yield from (str(name) for name, part in value.items() if name not in read and _is_something(part))
        if "messages" not in self._needed:
            return
        found: dict[str, None] = {}
        for name in read:
            turns = value.get(name)
            if name == self._optional.get("tools", "tools") or not isinstance(turns, list):
                continue
            for turn in turns:
                if isinstance(turn, dict) and ("role" in turn or "from" in turn):
                    known = _MESSAGE | self._words | (set() if "role" in turn else _TURN)
                    unknown = (key for key, part in turn.items() if key not in known and _is_something(part))
                    found |= {f"{name}[].{key}": None for key in unknown}
        yield from found

    def to_json(self) -> list[dict[str, Any]]:
        """``name``, ``rows`` and ``why`` of each, those of most rows first."""
        return merged([(name, count, self._why(name)) for name, count in self.rows.items()])

    def notes(self, key: str) -> list[str]:
        """``notes_of`` these."""
        return notes_of(key, self.to_json())

    def _why(self, name: str) -> str:
        return (_WHY if "messages" in self._needed else _WHY_TEXT).get(name, _OTHER)


def merged(found: Iterable[tuple[str, int, str]]) -> list[dict[str, Any]]:
    """One entry for each name, those of most rows first."""
    rows: dict[tuple[str, str], int] = {}
    for name, count, why in found:
        rows[name, why] = rows.get((name, why), 0) + count
    ordered = sorted(rows.items(), key=lambda one: (-one[1], one[0]))
    return [{"name": name, "rows": count, "why": why} for (name, why), count in ordered]


def notes_of(key: str, unread: list[dict[str, Any]], of: str = "") -> list[str]:
    """A line for each column that people take to be read, and one for all others."""
    notes, others = [], []
    for one in unread:
        rows = f"{one['rows']:,} {of}row{'s' if of or one['rows'] != 1 else ''}"
        if one["why"] == _OTHER:
            others.append(f"{one['name']} ({rows})")
        else:
            notes.append(f"{key}: {one['name']} is not read ({rows}): {one['why']}")
    if others:
        more = f" and {len(others) - _SHOWN} more, which toolkit data lists" if len(others) > _SHOWN else ""
        notes.append(f"{key}: not read: {', '.join(others[:_SHOWN])}{more}")
    return notes


def _is_something(value: Any) -> bool:
    return value is not None and value != "" and value != [] and value != {}
