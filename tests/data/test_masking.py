"""Which tokens are hidden: BERT's shares, anew in each epoch, and never a matter of processes or micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from toolkit.data.collate import Slot, collate
from toolkit.data.formats import Example
from toolkit.data.masking import Masking
from toolkit.data.opening import open_data
from toolkit.data.samples import MapSamples
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
I = -100  # noqa: E741  # short, so that a row of labels reads as one
MASK = 12


def test_the_shares_are_berts() -> None:
    masking = Masking(0.15, MASK, 1000, 0)
    ids = [*range(100, 600)]
    seen: Counter[str] = Counter()
    for number in range(200):
        hidden = masking.hide(Example(ids, list(ids)), 0, number)
        assert isinstance(hidden.labels, list)
        for before, now, label in zip(ids, hidden.input_ids, hidden.labels, strict=True):
            assert label in (I, before)
            assert label != I or now == before, "a token that is not predicted was changed"
            if label != I:
                seen["mask" if now == MASK else "kept" if now == before else "other"] += 1
    chosen = seen.total()
    # 100,000 tokens: the shares' standard deviations are 0.1 % of all and 0.3 % of the chosen.
    assert chosen / 100_000 == pytest.approx(0.15, abs=0.005)
    assert seen["mask"] / chosen == pytest.approx(0.8, abs=0.015)
    assert seen["other"] / chosen == pytest.approx(0.1, abs=0.012)


def test_a_sample_has_one_at_least_and_special_tokens_none() -> None:
    masking = Masking(1e-9, MASK, 10, 0)
    example = Example([1, 5, 6, 2], [I, 5, 6, I])
    for number in range(20):
        hidden = masking.hide(example, 0, number)
        assert isinstance(hidden.labels, list)
        assert sum(label != I for label in hidden.labels) == 1
        assert hidden.labels[0] == hidden.labels[3] == I
    nothing = Example([1, 2], [I, I])
    assert masking.hide(nothing, 0, 0) == nothing


def test_it_is_a_matter_of_seed_epoch_and_sample_alone() -> None:
    example = Example([*range(20)], [*range(20)])
    here = Masking(0.3, MASK, 100, 5).hide(example, 2, 7)
    assert here == Masking(0.3, MASK, 100, 5).hide(example, 2, 7)
    for other in (Masking(0.3, MASK, 100, 6).hide(example, 2, 7), *(Masking(0.3, MASK, 100, 5).hide(example, *at)
                  for at in ((3, 7), (2, 8)))):  # fmt: skip
        assert other != here
    alone = collate([example], Slot([7], 2, 0, 0, 1), "masked-lm", 0, masking=Masking(0.3, MASK, 100, 5))
    second = collate([example, example], Slot([1, 7], 2, 9, 1, 2), "masked-lm", 0, masking=Masking(0.3, MASK, 100, 5))
    assert alone.tensors["input_ids"][0].tolist() == second.tensors["input_ids"][1].tolist() == here.input_ids
    assert isinstance(here.labels, list)
    assert alone.supervised == sum(label != I for label in here.labels)


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    found = make_tokenizer(bos=True, adds="<s> $A </s>")
    found.add_special_tokens({"mask_token": "<|end|>"})
    return found


def test_from_files(make_recipe: Make, write_jsonl: Callable[..., Path], tokenizer: Any) -> None:
    recipe = make_recipe("masked-lm", train=write_jsonl([{"text": "a b c d"}] * 4), max_length=8)
    samples = open_data(recipe, "train", tokenizer)
    assert isinstance(samples, MapSamples)
    assert samples[0] == Example([1, 4, 5, 6, 7, 2], [I, 4, 5, 6, 7, I])
    assert samples.masking == Masking(0.15, MASK, len(tokenizer), 0)


def test_a_tokenizer_without_a_mask_token(
    make_recipe: Make, write_jsonl: Callable[..., Path], make_tokenizer: Any
) -> None:
    recipe = make_recipe("masked-lm", train=write_jsonl([{"text": "a b"}]))
    with pytest.raises(InputError, match=r"tokenizer\.path: masked-lm needs a tokenizer with a mask token"):
        open_data(recipe, "train", make_tokenizer())
