"""The optimizers that a recipe can name, each in a file of its own."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.optimizers.base import OptimizerKind
from toolkit.plugins import load_plugins

_OTHERS = ("base",)
REGISTERED: dict[str, OptimizerKind] = {}
"""Optimizers of other packages and files (toolkit/plugins.py)."""


def register(kind: OptimizerKind) -> None:
    """Make an optimizer known that is not a file beside this one. Raises ValueError if another has its name."""
    known = REGISTERED.get(kind.name)
    if kind.name in _own_names() or (known is not None and known.build != kind.build):
        raise ValueError(f"optimizer {kind.name!r} is defined by {kind.build} and elsewhere")
    REGISTERED[kind.name] = kind


@functools.cache
def _own_names() -> tuple[str, ...]:
    found = sorted(one.name.replace("_", "-") for one in pkgutil.iter_modules(__path__) if one.name not in _OTHERS)
    return ("adamw", *(name for name in found if name != "adamw"))


def optimizer_names() -> tuple[str, ...]:
    """Every optimizer's name, the default first, those of other packages last."""
    load_plugins()
    return (*_own_names(), *sorted(REGISTERED))


def optimizer_file(name: str) -> Path:
    """The file that defines the optimizer."""
    return Path(__file__).with_name(f"{name.replace('-', '_')}.py")


def is_optimizer(name: str) -> bool:
    """Whether there is an optimizer of that name."""
    return name in _own_names() or name in optimizer_names()


def optimizer_kind(name: str) -> OptimizerKind:
    """The optimizer of that name. Raises KeyError if there is none."""
    if name in _own_names():
        return _own_kind(name)
    if not is_optimizer(name):
        raise KeyError(name)
    return REGISTERED[name]


@functools.cache
def _own_kind(name: str) -> OptimizerKind:
    kind: OptimizerKind = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").OPTIMIZER
    return kind


def own_keys() -> dict[str, tuple[str, ...]]:
    """Keys of the section that not every optimizer has, and the optimizers that have each."""
    found: dict[str, list[str]] = {}
    for kind in (*map(_own_kind, _own_names()), *REGISTERED.values()):
        for key in kind.keys:
            found.setdefault(key, []).append(kind.name)
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
