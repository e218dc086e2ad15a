"""Recipes and tokenizers small enough to work out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.recipe.schema import Recipe

RecipeMaker = Callable[..., Recipe]


@pytest.fixture
def make_recipe() -> RecipeMaker:
    """``make_recipe(train=..., format=..., task=..., seed=..., num_labels=...)``; other keys go to data."""

    def make(task: str = "causal-lm", seed: int = 0, num_labels: int | None = None, **data: Any) -> Recipe:
        model = {"config": {"model_type": "llama"}, "task": task, "num_labels": num_labels}
        data = {"workers": 0, **{key: str(v) if isinstance(v, Path) else v for key, v in data.items()}}
        return Recipe.model_validate({"model": model, "data": data, "run": {"max_steps": 1, "seed": seed}})

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """``write_jsonl(rows, name="train.jsonl")``; a row that is a string is written as it stands."""

    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return file

    return write
