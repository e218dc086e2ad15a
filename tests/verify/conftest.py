"""Recipes to verify: no tokenizer and no data, `verify` brings its own samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

LORA = {"r": 4, "dropout": 0.1}
DROPPING = LLAMA | {"attention_dropout": 0.1}


@pytest.fixture(scope="session")
def lone_group() -> Iterator[WorkerGroup]:
    """One process, for the strategy `single`."""
    with WorkerGroup(1) as workers:
        yield workers


@pytest.fixture
def recipe() -> Callable[..., Resolved]:
    """A recipe by strategy, everything that can differ as keywords."""

    def make(strategy: str, /, **sections: Any) -> Resolved:
        values = recipe_dict(
            Path("nowhere"),
            strategy={"name": strategy},
            machine={"processes": 1 if strategy == "single" else 2},
            batch={"accumulation": 3},
            model={"config": DROPPING},
        )
        for key, value in sections.items():
            values[key] = values.get(key, {}) | value if isinstance(value, dict) and key != "adapter" else value
        return resolve(Recipe.model_validate(values), "recipe", device="cpu")

    return make
