"""The optimizers that a recipe can name, each in a file of its own."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.optimizers.base import OptimizerKind

_OTHERS = ("base",)


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Every optimizer's name, the default first."""
    found = sorted(one.name.replace("_", "-") for one in pkgutil.iter_modules(__path__) if one.name not in _OTHERS)
    return ("adamw", *(name for name in found if name != "adamw"))


def optimizer_file(name: str) -> Path:
    """The file that defines the optimizer."""
    return Path(__file__).with_name(f"{name.replace('-', '_')}.py")


@functools.cache
def optimizer_kind(name: str) -> OptimizerKind:
    """The optimizer of that name. Raises KeyError if there is none."""
    if name not in optimizer_names():
        raise KeyError(name)
    kind: OptimizerKind = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").OPTIMIZER
    return kind


@functools.cache
def own_keys() -> dict[str, tuple[str, ...]]:
    """Keys of the section that not every optimizer has, and the optimizers that have each."""
    found: dict[str, list[str]] = {}
    for name in optimizer_names():
        for key in optimizer_kind(name).keys:
            found.setdefault(key, []).append(name)
    return {key: tuple(names) for key, names in found.items()}


def has_key(name: str, key: str) -> bool:
    """Whether the optimizer ``name`` has ``key``; True for keys that all have."""
    return name in own_keys().get(key, (name,))


def with_optimizer(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of the recipe's section for another optimizer: without the keys that it does not have, and without
    those whose default it has of its own."""
    kind = optimizer_kind(name)
    if section.get("name", "adamw") == name:
        return dict(section)
    kept = {key: value for key, value in section.items() if has_key(name, key) and key not in kind.defaults}
    return kept | {"name": name}
