"""Marks of messages that are not learned, as tools and data sets write them, in one form: ``weight``, 0 or 1."""

from __future__ import annotations

from typing import Any

from toolkit.data.rows import Row

LEARNED = ("weight", "loss", "train", "training", "trainable", "loss_mask", "train_on_turn")
"""True or 1: the message is learned. weight: OpenAI. loss: ms-swift. train, training: Axolotl. loss_mask: verl."""
HIDDEN = ("masked",)
"""True or 1: it is not. masked: torchtune."""
UNCLEAR = ("mask",)
"""Some tools learn what it marks, others leave it out."""
MARKS = (*LEARNED, *HIDDEN, *UNCLEAR)
_VALUES = {"true": 1, "false": 0, "1": 1, "0": 0}


def with_weight(row: Row, at: str, message: dict[str, Any]) -> dict[str, Any]:
    """``message`` without marks but ``weight``, 0 or 1, where it has any; raises InputError at the row for a mark that
    can be read in two ways, and for two that contradict each other."""
    given = [name for name in MARKS if name in message]
    if not given:
        return message
    if (unclear := next((name for name in given if name in UNCLEAR), None)) is not None:
        raise row.error(
            f"{at}.{unclear}",
            "can mean that the message is learned, or that it is not; write weight instead: 1 (learned) or 0",
        )
    weights = {name: _weight(row, f"{at}.{name}", message[name], name in HIDDEN) for name in given}
    first = given[0]
    for name in given[1:]:
        if weights[name] != weights[first]:
            raise row.error(f"{at}.{name}", f"{message[name]!r} contradicts {first}: {message[first]!r}")
    return {key: part for key, part in message.items() if key not in MARKS} | {"weight": weights[first]}


def _weight(row: Row, at: str, value: Any, hidden: bool) -> int:
    found = _VALUES.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, int | float) or found not in (0, 1):
        means = "0 or 1 (not learned)" if hidden else "0 (not learned) or 1"
        raise row.error(at, f"must be {means}, not {value!r}")
    return int(not found) if hidden else int(found)
