"""The strategies, found by name: every module beside this one that defines Strategy classes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil

from toolkit.recipe.resolve import Decisions, Resolved, resolve_values
from toolkit.recipe.schema import Recipe
from toolkit.strategies.base import Strategy


@functools.cache
def strategies() -> dict[str, Strategy]:
    """Every strategy by name."""
    found: dict[str, Strategy] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.ispkg or module.name == "base":
            continue
        members = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        for member in members:
            if isinstance(member, type) and issubclass(member, Strategy) and "name" in vars(member):
                found[member.name] = member()
    return found


def strategy_of(resolved: Resolved) -> Strategy:
    """The strategy that a resolved recipe names."""
    return strategies()[resolved.recipe.strategy.name]


def resolve(recipe: Recipe, source: str = "recipe", *, device: str | None = None) -> Resolved:
    """Decide every derived value of a recipe, its strategy's own included.

    Raises InputError for every contradiction and for what the strategy cannot do.
    """
    decide = Decisions()
    resolved = resolve_values(recipe, source, decide, device=device)
    strategy = strategy_of(resolved)
    strategy.check(resolved)
    settings = strategy.settings(resolved, decide)
    return dataclasses.replace(resolved, settings=settings, decisions=tuple(decide.made))
