"""The strategies by name, and ``resolve``: a recipe with every derived value decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from toolkit.recipe.derive import resolve_values
from toolkit.recipe.resolve import Decisions, Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import REGISTERED, strategy_class, strategy_names
from toolkit.strategies.base import Strategy


def strategies() -> dict[str, Strategy]:
    """Every strategy by name, the simplest first."""
    return {name: REGISTERED[name]() for name in strategy_names()}


def strategy_named(name: str) -> Strategy:
    """The strategy that a valid recipe names."""
    kind = strategy_class(name)
    assert kind is not None, name
    return kind()


def strategy_of(resolved: Resolved) -> Strategy:
    """The strategy that a resolved recipe names."""
    return strategy_named(resolved.recipe.strategy.name)


def simplest(wanted: Callable[[Strategy], bool]) -> str:
    """The name of the strategy with the least precedence of those ``wanted``."""
    return min(filter(wanted, strategies().values()), key=lambda strategy: strategy.traits.precedence).name


def resolve(recipe: Recipe, source: str = "recipe", *, device: str | None = None) -> Resolved:
    """Derive every value of a recipe, including its strategy's. Raises InputError for every contradiction, and for what
    the strategy does not support."""
    decide = Decisions()
    strategy = strategy_named(recipe.strategy.name)
    resolved = resolve_values(recipe, source, decide, strategy.traits, strategy.data_size(recipe), device=device)
    strategy.check(resolved)
    settings = strategy.settings(resolved, decide)
    return dataclasses.replace(resolved, settings=settings, decisions=tuple(decide.made))
