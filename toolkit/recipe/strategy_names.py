"""The registry of strategies by name.

It is in this package so that the schema can check names; the classes register themselves (see
toolkit/strategies/base.py) when ``load_plugins`` imports their modules.
"""

from __future__ import annotations

import inspect
from typing import Any

from toolkit.plugins import load_plugins
from toolkit.recipe.known_names import listed, unknown
from toolkit.rooms import whole_keys

REGISTERED: dict[str, type[Any]] = {}


def own_keys() -> tuple[str, ...]:
    """Keys of the section ``strategy`` that are chosen for the named strategy: others are tried without them."""
    return "mesh", "sync", *whole_keys()


def register(name: str, strategy: type[Any]) -> None:
    """Register ``strategy`` as ``name``. Raises ValueError if a class of another file has the name."""
    known = REGISTERED.get(name)
    if known is not None and inspect.getsourcefile(known) != inspect.getsourcefile(strategy):
        raise ValueError(f"strategy {name!r} is defined by {known.__module__} and by {strategy.__module__}")
    REGISTERED[name] = strategy


def strategy_names() -> tuple[str, ...]:
    """Every registered name, the simplest strategy first."""
    load_plugins()
    return tuple(sorted(REGISTERED, key=lambda name: REGISTERED[name].traits.precedence))


def strategy_class(name: str) -> type[Any] | None:
    """The strategy of that name; None if there is none."""
    load_plugins(installed=False)
    if name not in REGISTERED:
        load_plugins()
    return REGISTERED.get(name)


def known_strategy(name: str) -> str:
    """Validate a strategy's name; for pydantic."""
    if strategy_class(name) is None:
        raise unknown(strategy_names())
    return name


list_names = listed(strategy_names)
