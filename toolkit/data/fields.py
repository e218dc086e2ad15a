"""The fields that a sample needs, and the check of a row: the same messages before and during a run."""

from __future__ import annotations

import struct
from typing import Any

from toolkit.data.images import place_images
from toolkit.data.messages import conversation, is_pair, pair, recognised, template_options, tools
from toolkit.data.rows import Fields, Row
from toolkit.data.text import check_text, kind_of
from toolkit.errors import InputError
from toolkit.recipe.load import did_you_mean
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of

CANONICAL = (
    "text", "prompt", "completion", "messages", "tokens", "label", "labels", "tools", "chat_template_kwargs", "image",
    "audio", "images",
)  # fmt: skip
_OPTIONAL = ("tools", "chat_template_kwargs", "system", "history", "prompt", "completion")
_IMAGES = "images"
_ASKED = {"number": "label"}
"""What recipes and data call a field, where its canonical name says more."""
_LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
"""The largest number of float32."""


def needed_fields(recipe: Recipe) -> dict[str, str]:
    """The needed fields as ``{canonical name: the data's own name}``.

    Raises InputError if the task has no such format, or ``data.fields`` names what is not needed.
    """
    task, form = recipe.model.task, recipe.data.format
    formats = task_of(task).formats
    if form not in formats:
        raise InputError.at(None, "data.format", f"{form} is not a format for {task}; expected {' or '.join(formats)}")
    needed = formats[form].fields
    asked = [_ASKED.get(name, name) for name in needed]
    allowed = (*asked, *_optional(recipe))
    for name in recipe.data.fields:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            message = f"{task} with format {form} has no field {name}; expected {', '.join(allowed)}{hint}"
            raise InputError.at(None, f"data.fields.{name}", message)
    return {name: recipe.data.fields.get(one, one) for name, one in zip(needed, asked, strict=True)}


def optional_fields(recipe: Recipe) -> dict[str, str]:
    """Fields that a row may have beside the needed ones, as ``needed_fields`` gives those."""
    return {name: recipe.data.fields.get(name, name) for name in _optional(recipe)}


def _optional(recipe: Recipe) -> tuple[str, ...]:
    if recipe.data.format != "messages":
        return ()
    return (*_OPTIONAL, _IMAGES) if task_of(recipe.model.task).media is not None else _OPTIONAL


def read_fields(needed: dict[str, str], optional: dict[str, str]) -> Fields:
    """What to read of a file of columns."""
    return Fields(tuple(needed.values()), (*optional.values(), "functions") if optional else ())


def canonical_row(row: Row, needed: dict[str, str], optional: dict[str, str] | None = None) -> dict[str, Any]:
    """The needed fields of ``row`` by their canonical names; raises InputError at the row.

    Of a conversation, also of one in ``prompt`` and ``completion``: ``messages`` in the form of ``data/messages.py``,
    ``tools`` (or None) and ``chat_template_kwargs``.
    """
    if "completion" in needed and is_pair(row.value, needed["prompt"], needed["completion"]):
        return {"messages": pair(row, needed["prompt"], needed["completion"])}
    if "messages" in needed:
        names = {name: name for name in _OPTIONAL} | (optional or {})
        if needed["messages"] not in row.value and not recognised(row.value, needed["messages"], names):
            raise row.error(needed["messages"], _missing(row, "messages", needed["messages"]))
        own = names.get(_IMAGES)
        messages = conversation(row, needed["messages"], own is not None, names)
        images = {} if own is None else {_IMAGES: place_images(row, messages, own)}
        return images | {
            "messages": messages,
            "tools": tools(row, names["tools"]),
            "chat_template_kwargs": template_options(row, names["chat_template_kwargs"]),
        }
    fields = {name: _checked(row, name, own) for name, own in needed.items()}
    if "tokens" in fields and len(fields["tokens"]) != len(fields["labels"]):
        message = f"{len(fields['labels'])} labels for {len(fields['tokens'])} words"
        raise row.error(needed["labels"], message)
    return fields


def _checked(row: Row, name: str, own: str) -> Any:
    if own not in row.value:
        raise row.error(own, _missing(row, name, own))
    value = row.value[own]
    if name == "label":
        return _label(row, own, value)
    if name == "number":
        return _number(row, own, value)
    if name in ("image", "audio"):
        return value  # opened where the sample is made
    if name in ("tokens", "labels"):
        if not isinstance(value, list):
            raise row.error(own, f"must be a list, not {kind_of(value)}")
        for one in value:
            if name == "labels":
                _label(row, own, one)
            else:
                check_text(row, own, one)
        return value
    check_text(row, own, value)
    if name == "completion" and not value:
        raise row.error(own, "is empty; remove this sample")
    return value


def _label(row: Row, own: str, value: Any) -> int | str:
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise row.error(own, f"must be an integer or a string, not {kind_of(value)}")
    return value


def _number(row: Row, own: str, value: Any) -> float:
    if isinstance(value, str):
        raise row.error(own, f"must be a number, not the string {value!r}")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise row.error(own, f"must be a number, not {kind_of(value)}")
    if not abs(value) <= _LARGEST:  # NaN is neither
        raise row.error(own, f"must be a number in float32's range, not {value!r}")
    return float(value)


def _missing(row: Row, name: str, own: str) -> str:
    here = [str(field) for field in row.value]
    near = did_you_mean(own, here)
    remedy = f"; if the data uses another name, set data.fields: {{{_ASKED.get(name, name)}: ...}}"
    return f"missing; the fields are: {', '.join(here) or 'none'}{near}{remedy}"
