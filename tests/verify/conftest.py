"""Recipes to verify: no tokenizer and no data, `verify` brings its own samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_writers as writers
import pytest
from checkpoint_writers import Plan

from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

LORA = {"r": 4, "dropout": 0.1}
DROPPING = LLAMA | {"attention_dropout": 0.1}


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


@pytest.fixture(scope="session")
def written(group: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder that a writer made, written once: ``written("zero3")``, ``written("plain", scale=2.0)``."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[tuple[str, Plan], Path] = {}

    def make(kind: str, **options: object) -> Path:
        plan = Plan(**options)  # type: ignore[arg-type]
        if (kind, plan) in made:
            return made[kind, plan]
        target = root / str(len(made)) / (f"{kind}.pt" if kind == "plain" else kind)
        if kind == "plain":
            writers.plain(target, plan)
        elif kind.startswith("universal"):
            writers.universal(make(f"zero{kind[-1]}", **options), target)
        elif kind == "trainer-single":
            writers.trainer(target, "single", plan)
        elif kind == "trainer-adapter":
            writers.trainer(target, "single", plan, adapter=True)
        elif kind.startswith("trainer-"):
            group.run(writers.trainer, target, kind.removeprefix("trainer-"), plan)
        elif kind.startswith("accelerate-"):
            name, _, full = kind.removeprefix("accelerate-").partition("-")
            group.run(writers.accelerate_state, target, name, full == "full", plan)
        else:
            group.run(writers.deepspeed_engine, target, int(kind[-1]), plan)
        made[kind, plan] = target
        return target

    return make
