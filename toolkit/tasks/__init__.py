"""The tasks that a model can be trained for, each in a file of its own."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from toolkit.tasks.base import Task

_OTHERS = ("base", "image_shapes", "labels")


@functools.cache
def task_names() -> tuple[str, ...]:
    """Every task's name, the default first."""
    found = sorted(one.name.replace("_", "-") for one in pkgutil.iter_modules(__path__) if one.name not in _OTHERS)
    return ("causal-lm", *(name for name in found if name != "causal-lm"))


def task_file(name: str) -> Path:
    """The file that defines the task."""
    return Path(__file__).with_name(f"{name.replace('-', '_')}.py")


@functools.cache
def task_of(name: str) -> Task:
    """The task of that name. Raises KeyError if there is none."""
    if name not in task_names():
        raise KeyError(name)
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").TASK
