"""The tiny tokenizers and files of tests/data, and recipes that `toolkit data` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.conftest import make_tokenizer, write_jsonl  # noqa: F401
from toolkit.inspection.measure import Measured, measure
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

Resolve = Callable[..., Resolved]
Look = Callable[..., Measured]


@pytest.fixture
def resolved_of() -> Resolve:
    """``resolved_of(train=..., processes=..., micro=..., attention=...)``; other keys go to data."""

    def make(
        task: str = "causal-lm", processes: int = 1, micro: int = 2, attention: str = "sdpa", **data: Any
    ) -> Resolved:
        kind = "t5" if task == "seq2seq-lm" else "llama"
        model = {"config": {"model_type": kind}, "task": task, "attention": attention}
        data = {"workers": 0, **{key: str(v) if isinstance(v, Path) else v for key, v in data.items()}}
        recipe = Recipe.model_validate({
            "model": model,
            "data": data,
            "batch": {"micro_size": micro, "accumulation": 2},
            "strategy": {"name": "ddp" if processes > 1 else "single"},
            "machine": {"device": "cpu", "processes": processes},
            "run": {"max_steps": 1, "seed": 5, "eval_every": 0},
        })  # fmt: skip
        return resolve(recipe, device="cpu")

    return make


@pytest.fixture
def look(resolved_of: Resolve) -> Look:
    """``look(tokenizer, train=..., ...)``: what the command measures."""

    def make(tokenizer: Any, which: Any = "train", samples: int = 3, only: Any = None, rows: Any = None, **data: Any):
        return measure(resolved_of(**data), tokenizer, which=which, samples=samples, only=only, rows=rows)

    return make
