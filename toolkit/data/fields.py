"""The fields that a sample needs, and the check of a row: the same messages before and during a run."""

from __future__ import annotations

from typing import Any

from toolkit.data.rows import Row
from toolkit.errors import InputError
from toolkit.recipe.load import did_you_mean
from toolkit.recipe.schema import Recipe

CANONICAL = ("text", "prompt", "completion", "messages", "label")

_NEEDED = {
    ("causal-lm", "text"): ("text",),
    ("causal-lm", "prompt-completion"): ("prompt", "completion"),
    ("causal-lm", "messages"): ("messages",),
    ("seq2seq-lm", "prompt-completion"): ("prompt", "completion"),
    ("sequence-classification", "text"): ("text", "label"),
}


def needed_fields(recipe: Recipe) -> dict[str, str]:
    """The needed fields as ``{canonical name: the data's own name}``.

    Raises InputError if the task has no such format, or ``data.fields`` names what is not needed.
    """
    task, form = recipe.model.task, recipe.data.format
    needed = _NEEDED.get((task, form))
    if needed is None:
        formats = " or ".join(f for t, f in _NEEDED if t == task)
        raise InputError.at(None, "data.format", f"{form} is not a format for {task}; expected {formats}")
    for name in recipe.data.fields:
        if name not in needed:
            hint = did_you_mean(name, needed)
            message = f"{task} with format {form} has no field {name}; expected {', '.join(needed)}{hint}"
            raise InputError.at(None, f"data.fields.{name}", message)
    return {name: recipe.data.fields.get(name, name) for name in needed}


def canonical_row(row: Row, needed: dict[str, str]) -> dict[str, Any]:
    """The needed fields of ``row`` by their canonical names; raises InputError at the row."""
    return {name: _checked(row, name, own) for name, own in needed.items()}


def _checked(row: Row, name: str, own: str) -> Any:
    if own not in row.value:
        raise row.error(own, _missing(row, name, own))
    value = row.value[own]
    if name == "messages":
        return _messages(row, own, value)
    if name == "label":
        if not isinstance(value, int | str) or isinstance(value, bool):
            raise row.error(own, f"must be an integer or a string, not {_kind(value)}")
        return value
    _check_text(row, own, value)
    if name == "completion" and not value:
        raise row.error(own, "is empty; remove this sample")
    return value


def _missing(row: Row, name: str, own: str) -> str:
    here = [str(field) for field in row.value]
    near = did_you_mean(own, here)
    remedy = f"; if the data uses another name, set data.fields: {{{name}: ...}}"
    return f"missing; the fields are: {', '.join(here) or 'none'}{near}{remedy}"


def _messages(row: Row, own: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise row.error(own, f"must be a list of {{role, content}}, not {_kind(value)}")
    if not value:
        raise row.error(own, "is empty; a conversation needs at least one assistant turn")
    messages = []
    for index, message in enumerate(value):
        at = f"{own}[{index}]"
        if not isinstance(message, dict):
            raise row.error(at, f"must be {{role, content}}, not {_kind(message)}")
        # Parquet gives every message the keys of all; a missing key and null mean the same.
        present = {key: part for key, part in message.items() if part is not None}
        for part in ("role", "content"):
            if part in present:
                _check_text(row, f"{at}.{part}", present[part])
            elif part == "role" or not present.get("tool_calls"):
                near = did_you_mean(part, map(str, present))
                raise row.error(f"{at}.{part}", f"missing; the keys are: {', '.join(map(str, present))}{near}")
        messages.append(present)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        raise row.error(own, f"has no assistant turn, so no supervised token (roles: {roles})")
    return messages


def _check_text(row: Row, field: str, value: Any) -> None:
    if not isinstance(value, str):
        raise row.error(field, f"must be a string, not {_kind(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            # JSON can write half of a surrogate pair ("\ud800"); no tokenizer takes it.
            raise row.error(field, f"unpaired surrogate at character {error.start}: not valid text") from None


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else f"{value!r}" if isinstance(value, bool | int | float) else "a string"
