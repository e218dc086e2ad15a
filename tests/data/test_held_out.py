"""``data.eval_fraction`` and held-out sets by name: which rows are trained, and which are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.held_out import is_held_out
from toolkit.data.loader import open_data
from toolkit.data.rows import Row
from toolkit.data.sources import held_out_recipes
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe

LETTERS = "abcdef"


def rows_of(count: int) -> list[dict[str, Any]]:
    """Texts that all differ, of letters that are a token each."""
    digits = [" ".join(LETTERS[number // 6**place % 6] for place in range(5)) for number in range(count)]
    return [{"text": text, "id": at} for at, text in enumerate(digits)]


def texts(recipe: Recipe, which: Any, tokenizer: Any) -> list[tuple[int, ...]]:
    samples = open_data(recipe, which, tokenizer)
    return [tuple(samples[at].input_ids) for at in range(len(samples))]  # type: ignore[index,arg-type]


@pytest.mark.parametrize("copies", [1, 3])
def test_the_split_is_of_the_content_alone(
    copies: int,
    make_recipe: Callable[..., Recipe],
    write_jsonl: Callable[..., Path],
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer, rows = make_tokenizer(), rows_of(400)
    file = write_jsonl([row | {"id": at} for at, row in enumerate(rows * copies)])
    turned = write_jsonl(list(reversed(rows)), "turned.jsonl")
    kept = texts(make_recipe(train=file, eval_fraction=0.2, seed=1), "train", tokenizer)
    held_out = texts(make_recipe(train=file, eval_fraction=0.2, seed=2), "eval", tokenizer)
    assert not set(kept) & set(held_out), "a row, or a copy of it, is on both sides"
    assert len(kept) + len(held_out) == 400 * copies
    assert 0.15 < len(held_out) / (400 * copies) < 0.25
    assert set(texts(make_recipe(train=turned, eval_fraction=0.2), "eval", tokenizer)) == set(held_out)
    more = texts(make_recipe(train=turned, eval_fraction=0.5), "eval", tokenizer)
    assert set(held_out) < set(more), "a larger share holds out the same rows and more"


def test_a_cache_keeps_the_two_sides_apart(
    make_recipe: Callable[..., Recipe],
    write_jsonl: Callable[..., Path],
    make_tokenizer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    tokenizer, file = make_tokenizer(), write_jsonl(rows_of(60))
    recipe = make_recipe(train=file, eval_fraction=0.3, cache=tmp_path / "cache")
    for _ in range(2):
        kept, held_out = (texts(recipe, which, tokenizer) for which in ("train", "eval"))
        assert len(set(kept) | set(held_out)) == len(kept) + len(held_out) == 60
    whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"eval_fraction": None})})
    assert len(texts(whole, "train", tokenizer)) == 60


def test_every_source_and_a_stream_are_split(
    make_recipe: Callable[..., Recipe], write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer, rows = make_tokenizer(), rows_of(200)
    parts = [write_jsonl(rows[:100], "a.jsonl"), write_jsonl(rows[100:], "b.jsonl"), write_jsonl(rows[:1], "few.jsonl")]
    whole = write_jsonl(rows, "whole.jsonl")
    expected = set(texts(make_recipe(train=whole, eval_fraction=0.1), "eval", tokenizer))
    sources = [{"path": str(part), "weight": 0.5} for part in parts[:2]] + [{"path": str(parts[2])}]
    mixed = make_recipe(train=sources, eval_fraction=0.1)
    assert sorted(texts(mixed, "eval", tokenizer)) == sorted(expected), "each once, whatever its weight in training"
    streamed = make_recipe(train=whole, eval_fraction=0.1, streaming=True)
    for which, other in (("eval", False), ("train", True)):
        samples: Any = open_data(streamed, which, tokenizer)  # type: ignore[arg-type]
        found = {tuple(samples.build(row, fields).input_ids) for _, row, fields in samples.rows()}
        assert found.isdisjoint(expected) if other else found == expected


def test_a_share_without_a_row_says_what_to_do(
    make_recipe: Callable[..., Recipe], write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any]
) -> None:
    recipe = make_recipe(train=write_jsonl(rows_of(3)), eval_fraction=1e-6)
    with pytest.raises(InputError, match=r"data.eval_fraction: no row of .*train.jsonl falls into a share of 1e-06"):
        open_data(recipe, "eval", make_tokenizer())
    # The same row many times is all on one side.
    for streamed in (False, True):
        recipe = make_recipe(train=write_jsonl(rows_of(1) * 8), eval_fraction=0.999999, streaming=streamed)
        with pytest.raises(InputError, match=r"data.train: every row of .*jsonl is held out by data.eval_fraction"):
            open_data(recipe, "train", make_tokenizer())


def test_content_that_has_no_bytes_is_refused_and_images_count_by_their_pixels() -> None:
    from PIL import Image

    def held(image: Any) -> bool:
        return is_held_out(Row({"image": image, "label": 1}, "rows", 1), {"image", "label"}, 0.5)

    pictures = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in range(64)]
    assert 10 < sum(held(picture) for picture in pictures) < 54
    assert [held(picture.copy()) for picture in pictures] == [held(picture) for picture in pictures]
    with pytest.raises(InputError, match=r"rows:1: data.eval_fraction: a object cannot be compared by content"):
        held(object())


def test_sets_by_name_are_opened_one_by_one(
    make_recipe: Callable[..., Recipe], write_jsonl: Callable[..., Path], make_tokenizer: Callable[..., Any]
) -> None:
    tokenizer, rows = make_tokenizer(), rows_of(9)
    news, first, second = (
        str(write_jsonl(part, f"{at}.jsonl")) for at, part in enumerate((rows[:2], rows[2:5], rows[5:]))
    )
    recipe = make_recipe(train=news, eval={"news": news, "code": [{"path": first}, {"path": second}]})
    each = {name: len(texts(one, "eval", tokenizer)) for name, one in held_out_recipes(recipe).items()}
    assert each == {"news": 2, "code": 7}
    assert len(texts(recipe, "eval", tokenizer)) == 9, "`toolkit data --eval` shows all of them"
    with pytest.raises(InputError, match=r"data\.eval\.news: "):
        open_data(make_recipe(train=news, eval={"news": "absent.jsonl"}), "eval", tokenizer)
