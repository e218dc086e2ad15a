"""Classifiers of encoder-decoders (BART, T5) read a text at its end-of-sequence: every row of a batch has one, the same
number of times, whatever was cut, and on ranks without samples as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from families import EVERY_FAMILY
from toolkit.data.key import cache_key
from toolkit.data.loader import TrainLoader, open_data
from toolkit.data.sources import open_source
from toolkit.errors import InputError
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.pooling import pooled_token
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]
END = 2
BART = EVERY_FAMILY["bart"]["config"]


@pytest.fixture
def classifier(make_recipe: Make) -> Make:
    def make(config: dict[str, Any] = BART, **data: Any) -> Recipe:
        recipe = make_recipe(task="sequence-classification", num_labels=3, shuffle=False, **data)
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})

    return make


def rows(count: int, words: str = "a b") -> list[dict[str, Any]]:
    return [{"text": words, "label": number % 3} for number in range(count)]


def test_models_that_read_the_end_are_known_by_their_code(classifier: Make) -> None:
    for kind, token in {"bart": 2, "t5": 1, "mbart": 2, "bert": None, "llama": None, "t5gemma": None}.items():
        recipe = classifier({"model_type": kind}, train="unread")
        assert pooled_token(recipe, ModelFacts({"model_type": kind}, None)) == token, kind
    own = {"model_type": "t5", "eos_token_id": 7}
    assert pooled_token(classifier(own, train="unread"), ModelFacts(own, None)) == 7


@pytest.mark.parametrize("style", [{}, {"streaming": True}, {"mix": True}, {"end": 1}])
def test_a_rank_with_nothing_left_has_a_row_that_the_model_takes(
    classifier: Make, make_tokenizer: Any, write_jsonl: Write, style: dict[str, Any]
) -> None:
    end = style.pop("end", END)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    shape = BART | {"eos_token_id": end, "forced_eos_token_id": end}
    train: Any = write_jsonl(rows(5))
    if style.pop("mix", False):
        train = [{"path": str(train)}, {"path": str(write_jsonl(rows(4), "other.jsonl"))}]
    recipe = classifier(shape, train=train, **style)
    loader = TrainLoader(
        open_data(recipe, "train", tokenizer), recipe,
        micro_size=2, accumulation=2 if isinstance(train, Path) else 4, data_size=2, data_rank=1, device_type="cpu",
    )  # fmt: skip
    window = next(iter(loader))
    empty = [micro for micro in window if not micro.sample_ids]
    assert empty
    config = AutoConfig.for_model(**shape, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for micro in window:
        ids = micro.tensors["input_ids"]
        assert (ids == end).sum(1).tolist() == [1] * len(ids)
        assert model(**{name: ids for name, ids in micro.tensors.items() if name != "labels"}).logits.isfinite().all()
    assert all(torch.equal(micro.tensors["labels"], torch.tensor([-100])) for micro in empty)


def test_a_cut_sample_keeps_its_end(classifier: Make, make_tokenizer: Any, write_jsonl: Write) -> None:
    samples = open_data(classifier(train=write_jsonl(rows(2, "a b c d")), max_length=3), "train", make_tokenizer())
    assert samples[0].input_ids == [4, 5, END]
    assert samples[0].cut
    llama = classifier({"model_type": "llama"}, train=write_jsonl(rows(2, "a b c d")), max_length=3)
    assert open_data(llama, "train", make_tokenizer())[0].input_ids == [4, 5, 6]


def test_samples_of_another_model_are_not_taken_from_the_cache(
    classifier: Make, make_tokenizer: Any, write_jsonl: Write
) -> None:
    train, tokenizer = write_jsonl(rows(2)), make_tokenizer()
    keys = set()
    for config in (BART, {"model_type": "llama"}):
        recipe = classifier(config, train=train)
        keys.add(cache_key(recipe, open_source(recipe, "train"), tokenizer, None))
    assert len(keys) == 2


def test_a_tokenizer_that_writes_another_end_is_refused(
    classifier: Make, make_tokenizer: Any, write_jsonl: Write
) -> None:
    recipe = classifier(BART | {"eos_token_id": 9}, train=write_jsonl(rows(2)))
    with pytest.raises(InputError) as caught:
        open_data(recipe, "train", make_tokenizer())
    assert "train.jsonl:1: text: the sample does not have the token 9 ('f'; eos_token_id" in str(caught.value)
