"""The check of a task's name in a recipe."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from toolkit.tasks import task_names


def known_task(name: str) -> str:
    """Validate a task's name; for pydantic."""
    names = task_names()
    if name not in names:
        expected = ", ".join(map(repr, names[:-1])) + f" or {names[-1]!r}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return name


def list_tasks(schema: dict[str, Any]) -> None:
    """Put the names into the JSON schema of the key; for pydantic."""
    schema["enum"] = list(task_names())
