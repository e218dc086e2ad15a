"""Recipes and tokenizers small enough to work out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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


WORDS = ["<pad>", "<s>", "</s>", "<unk>", "a", "b", "c", "d", "e", "f", "<|user|>", "<|assistant|>", "<|end|>"]
"""a is 4, b is 5, ... f is 9; the marks of a chat are 10, 11, 12."""


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """``make_tokenizer(bos, eos, adds)``: a word a token; ``adds`` is what it writes around a text."""

    def make(
        bos: bool = False, eos: bool = True, adds: str = "$A", pad: bool = True, template: str | None = None
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.post_processor = processors.TemplateProcessing(
            single=adds, pair=None, special_tokens=[(w, i) for i, w in enumerate(WORDS) if w.startswith("<")]
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            unk_token="<unk>",
            bos_token="<s>" if bos else None,
            eos_token="</s>" if eos else None,
            pad_token="<pad>" if pad else None,
            extra_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
        )
        tokenizer.chat_template = template
        return tokenizer

    return make
