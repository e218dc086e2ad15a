"""Checks of single values of a row."""

from __future__ import annotations

from typing import Any

from toolkit.data.rows import Row


def check_text(row: Row, field: str, value: Any) -> None:
    """Raise InputError at the row unless ``value`` is a string that a tokenizer can take."""
    if not isinstance(value, str):
        raise row.error(field, f"must be a string, not {kind_of(value)}")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            # JSON can write half of a surrogate pair ("\ud800"); no tokenizer takes it.
            raise row.error(field, f"unpaired surrogate at character {error.start}: not valid text") from None


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else f"{value!r}" if isinstance(value, bool | int | float) else "a string"
