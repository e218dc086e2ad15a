"""Checks of names in a recipe (of a task, a strategy, an optimizer) and their lists in its JSON schema; for
pydantic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import PydanticCustomError

from toolkit.tasks import task_names


def unknown(names: Sequence[str]) -> PydanticCustomError:
    """The error of a name that is none of ``names``."""
    expected = ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"
    return PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


def listed(names: Callable[[], Sequence[str]]) -> Callable[[dict[str, Any]], None]:
    """Puts the names into the JSON schema of the key."""

    def put(schema: dict[str, Any]) -> None:
        schema["enum"] = list(names())

    return put


def known_task(name: str) -> str:
    """Validate a task's name."""
    if name not in task_names():
        raise unknown(task_names())
    return name


list_tasks = listed(task_names)
