"""Labels of words: on a word's first token, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cases import every_case
from toolkit.data.formats import Example, Formatter
from toolkit.data.opening import open_data
from toolkit.data.rows import Row
from toolkit.data.samples import MapSamples
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
I = -100  # noqa: E741  # short, so that a row of labels reads as one


def by_characters() -> PreTrainedTokenizerFast:
    """[CLS] a word's characters [SEP]: every word has several tokens."""
    marks = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2}
    backend = Tokenizer(models.WordLevel(marks | {c: i for i, c in enumerate("abcdef", 3)}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


def build(recipe: Recipe, tokenizer: Any, names: list[str] | None = None, **row: Any) -> Example:
    return Formatter(recipe, tokenizer, names).examples(Row(row, "x.jsonl", 7))[0]


@pytest.fixture
def recipe(make_recipe: Make) -> Callable[..., Recipe]:
    return lambda **data: make_recipe("token-classification", format="tokens", num_labels=3, **({"train": "x"} | data))


def test_a_words_first_token_has_its_label(recipe: Callable[..., Recipe]) -> None:
    example = build(recipe(), by_characters(), tokens=["ab", "c", "def"], labels=[2, 0, 1])
    assert example == Example([1, 3, 4, 5, 6, 7, 8, 2], [I, 2, I, 0, 1, I, I, I])
    short = build(recipe(max_length=3), by_characters(), tokens=["ab", "c", "def"], labels=[2, 0, 1])
    assert short == Example([1, 3, 4], [I, 2, I], cut=True)
    assert build(recipe(), by_characters(), tokens=[], labels=[]) == Example([1, 2], [I, I])


def test_names_of_classes_are_numbered_over_all_words(
    recipe: Callable[..., Recipe], write_jsonl: Callable[..., Path]
) -> None:
    rows = [{"words": ["ab", "c"], "labels": ["O", "B-PER"]}, {"words": ["d"], "labels": ["I-PER"]}]
    samples = open_data(recipe(train=write_jsonl(rows), fields={"tokens": "words"}), "train", by_characters())
    assert isinstance(samples, MapSamples)
    assert samples.label_names == ["B-PER", "I-PER", "O"]
    assert [samples[at].labels for at in range(2)] == [[I, 2, I, 0, I], [I, 1, I]]
    assert samples.supervised == 3


@every_case(
    ("row", "message"),
    [
        ({"tokens": ["a"], "labels": [0, 1]}, "2 labels for 1 words"),
        ({"tokens": "a b", "labels": [0, 1]}, "must be a list, not a string"),
        ({"tokens": ["a", 3], "labels": [0, 1]}, "must be a string, not 3"),
        ({"tokens": ["a"], "labels": [1.5]}, "must be an integer or a string, not 1.5"),
        ({"tokens": ["a"], "labels": [3]}, "3 is not a class; classes are the integers from 0 to 2"),
        ({"tokens": ["a"]}, "labels: missing; the fields are: tokens"),
    ],
)
def test_bad_rows(recipe: Callable[..., Recipe], row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        build(recipe(), by_characters(), **row)
    assert "x.jsonl:7" in str(error.value)


def test_a_tokenizer_that_does_not_say_which_word_a_token_is_of(recipe: Callable[..., Recipe]) -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(InputError, match="ByT5Tokenizer is not a fast tokenizer"):
        build(recipe(), ByT5Tokenizer(), tokens=["a"], labels=[0])
