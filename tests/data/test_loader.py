"""What every rank gets: each sample once an epoch, the same whatever the workers, the same after a resume."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import recipe_dict
from toolkit.data import samples as samples_module
from toolkit.data import stream
from toolkit.data.collate import MicroBatch
from toolkit.data.loader import TrainLoader, eval_batches, open_data
from toolkit.errors import InputError
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]
N = 23
STEPS = 3  # per epoch: 23 samples in windows of 8


@pytest.fixture
def train(write_jsonl: Write) -> Path:
    words = random.Random(0)
    return write_jsonl([{"text": " ".join(words.choices("abcdef", k=words.randint(2, 9)))} for _ in range(N)])


def loader(recipe: Recipe, tokenizer: Any, rank: int = 0, **options: Any) -> TrainLoader:
    options = {"micro_size": 2, "accumulation": 2, "data_size": 2, "device_type": "cpu", **options}
    return TrainLoader(open_data(recipe, "train", tokenizer), recipe, data_rank=rank, **options)


def plain(batch: MicroBatch) -> tuple:
    tensors = {name: tensor.tolist() for name, tensor in batch.tensors.items()}
    bounds = [] if batch.bounds is None else [(batch.bounds.starts.tolist(), batch.bounds.longest)]
    return (tensors, *astuple(replace(batch, bounds=None))[1:-2], *bounds)


def first(loaded: TrainLoader, count: int) -> list[list[tuple]]:
    return [[plain(batch) for batch in window] for window in islice(loaded, count)]


def ids(windows: list[list[tuple]]) -> list[list[int]]:
    return [[i for batch in window for i in batch[1]] for window in windows]


STYLES = [{"streaming": False}, {"streaming": True}]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_every_sample_once_over_all_ranks(
    make_recipe: Make, make_tokenizer: Any, train: Path, style: dict, shuffle: bool
) -> None:
    recipe = make_recipe(train=train, shuffle=shuffle, seed=5, **style)
    ranks = [first(loader(recipe, make_tokenizer(), rank), 2 * STEPS) for rank in range(2)]
    orders = []
    for epoch in range(2):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        seen = [i for rank in ranks for window in ids(rank)[part] for i in window]
        assert sorted(seen) == list(range(N))
        orders.append(seen)
        assert {batch[3] for rank in ranks for window in rank[part] for batch in window} == {epoch}
    assert (orders[0] != orders[1]) == shuffle
    for mine, other in zip(*ranks, strict=True):
        assert [batch[3:] for batch in mine] == [batch[3:] for batch in other]
    # 23 = 8 + 8 + 7: the last window is 4 + 3, rank 1 short in its second micro-batch.
    assert [[len(batch[1]) for batch in window] for window in ranks[1][:3]] == [[2, 2], [2, 2], [2, 1]]
    assert [window[0][4] for window in ranks[0]] == list(range(2 * STEPS))


@pytest.mark.parametrize("style", STYLES)
def test_a_rank_with_nothing_left_gets_a_dummy(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, style: dict
) -> None:
    recipe = make_recipe(train=write_jsonl([{"text": "a b"}] * 5), shuffle=False, **style)
    [window] = first(loader(recipe, make_tokenizer(), rank=1), 1)
    assert [batch[1] for batch in window] == [[2, 3], []]
    assert window[1][0]["labels"] == [[-100, -100]]
    assert window[1][2] == 0


@pytest.mark.parametrize("style", STYLES)
def test_the_tensors_are_the_samples(make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, style: dict) -> None:
    recipe = make_recipe(train=write_jsonl([{"text": "a b"}, {"text": "c"}]), shuffle=False, **style)
    [[batch]] = first(loader(recipe, make_tokenizer(), data_size=1), 1)
    assert batch == (
        {
            "input_ids": [[4, 5, 2], [6, 2, 0]],
            "attention_mask": [[1, 1, 1], [1, 1, 0]],
            "labels": [[4, 5, 2], [6, 2, -100]],
        },
        [0, 1],
        3,
        0,
        0,
        0,
        1,
        {},
        None,
    )


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(make_recipe: Make, make_tokenizer: Any, train: Path, style: dict, workers: int) -> None:
    alone, helped = (
        first(loader(make_recipe(train=train, workers=count, **style), make_tokenizer(), 1), STEPS + 1)
        for count in (0, workers)
    )
    assert alone == helped


@pytest.mark.parametrize("style", STYLES)
def test_resuming_goes_on_as_if_never_stopped(make_recipe: Make, make_tokenizer: Any, train: Path, style: dict) -> None:
    recipe = make_recipe(train=train, seed=3, **style)
    whole = first(loader(recipe, make_tokenizer(), 1), 12)
    for start in (1, 3, 4, 8):
        assert first(loader(recipe, make_tokenizer(), 1, start_window=start), 4) == whole[start : start + 4], start


@pytest.mark.parametrize("style", STYLES)
def test_ranks_do_not_change_what_shares_a_step(
    make_recipe: Make, make_tokenizer: Any, train: Path, style: dict
) -> None:
    recipe = make_recipe(train=train, seed=3, **style)
    alone = first(loader(recipe, make_tokenizer(), micro_size=8, accumulation=1, data_size=1), 6)
    four = [
        first(loader(recipe, make_tokenizer(), rank, micro_size=1, accumulation=2, data_size=4), 6) for rank in range(4)
    ]
    together = [sorted(i for rank in four for i in ids(rank)[step]) for step in range(6)]
    assert [sorted(window) for window in ids(alone)] == together


def test_streamed_without_shuffle_is_what_is_in_memory(make_recipe: Make, make_tokenizer: Any, train: Path) -> None:
    memory, streamed = (
        first(loader(make_recipe(train=train, shuffle=False, **style), make_tokenizer()), 7) for style in STYLES
    )
    assert memory == streamed


def test_a_small_shuffle_buffer_still_gives_every_sample_once() -> None:
    once, again = (list(stream.shuffled(range(50), seed=1, epoch=0, size=7)) for _ in range(2))
    assert once == again != list(range(50))
    assert sorted(once) == list(range(50))
    assert [item for at, item in enumerate(once) if item > at + 6] == []  # no more than 7 are held back
    assert set(range(7)) - set(once[-7:])  # and what comes early leaves in between, not all at the end
    assert list(stream.shuffled(range(50), seed=1, epoch=1, size=7)) != once


def test_steps_per_epoch(make_recipe: Make, make_tokenizer: Any, train: Path) -> None:
    assert loader(make_recipe(train=train), make_tokenizer()).steps_per_epoch == STEPS
    assert loader(make_recipe(train=train, streaming=True), make_tokenizer()).steps_per_epoch is None


@pytest.mark.usefixtures("launches")
def test_the_global_random_numbers_are_left_alone(make_recipe: Make, make_tokenizer: Any, train: Path) -> None:
    before = torch.get_rng_state()
    first(loader(make_recipe(train=train, workers=1), make_tokenizer()), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_line_met_while_streaming_is_one_message(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(samples_module, "PEEKED", 2)
    file = write_jsonl([{"text": "a b"}] * 8 + ["not json"])
    recipe = make_recipe(train=file, streaming=True, shuffle=False, workers=workers)
    windows: Iterator[list[MicroBatch]] = iter(loader(recipe, make_tokenizer()))
    assert len(next(windows)) == 2
    with pytest.raises(InputError) as caught:
        next(windows)
    assert str(caught.value).startswith(f"{file}:9: not valid JSON")
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("style", STYLES)
def test_evaluation_is_every_sample_once_in_order(
    make_recipe: Make, make_tokenizer: Any, train: Path, style: dict
) -> None:
    recipe = make_recipe(train="unread.jsonl", eval=train, **style)
    samples = open_data(recipe, "eval", make_tokenizer())
    ranks = [[plain(batch) for batch in eval_batches(samples, recipe, 3, 4, rank, "cpu")] for rank in range(4)]
    assert [batch[1] for batch in ranks[0]] == [[0, 1, 2], [12, 13, 14]]
    assert [batch[1] for batch in ranks[3]] == [[9, 10, 11], [21, 22]]
    assert sorted(i for rank in ranks for batch in rank for i in batch[1]) == list(range(N))
    again = [plain(batch) for batch in eval_batches(samples, recipe, 3, 4, 0, "cpu")]
    assert again == ranks[0]


def test_samples_in_memory(make_recipe: Make, make_tokenizer: Any, write_jsonl: Write) -> None:
    rows = [{"prompt": "a ", "completion": "b c d"}, {"prompt": "a b c d", "completion": " e"}]
    recipe = make_recipe(train=write_jsonl(rows), format="prompt-completion", max_length=3)
    samples = open_data(recipe, "train", make_tokenizer())
    assert len(samples) == 2
    assert samples[0].input_ids == [4, 5, 6]
    assert samples[0].labels == [-100, 5, 6]
    assert samples.notes == [
        "data.train: 2 of 2 samples were truncated to data.max_length=3",
        "data.train: 1 of 2 samples have no supervised token and do not affect training",
    ]
    with pytest.raises(IndexError):
        samples[2]


@pytest.mark.parametrize("style", STYLES)
def test_data_that_teaches_nothing_is_refused(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, style: dict
) -> None:
    rows = [{"prompt": "a b c d", "completion": " e"}] * 3
    recipe = make_recipe(train=write_jsonl(rows), format="prompt-completion", max_length=3, **style)
    with pytest.raises(InputError, match=r"data\.train: .* none of its (first )?3 samples has a supervised token"):
        open_data(recipe, "train", make_tokenizer())


@pytest.mark.parametrize("style", STYLES)
def test_data_without_samples_is_refused(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write, style: dict
) -> None:
    with pytest.raises(InputError, match=r"data\.train: .* has no samples"):
        open_data(make_recipe(train=write_jsonl([""]), **style), "train", make_tokenizer())


def test_string_labels_are_numbered_by_the_training_data(
    make_recipe: Make, make_tokenizer: Any, write_jsonl: Write
) -> None:
    train = write_jsonl([{"text": "a", "label": name} for name in ("spam", "eggs", "ham", "eggs")])
    held_out = write_jsonl([{"text": "a", "label": "ham"}], "eval.jsonl")
    recipe = make_recipe(task="sequence-classification", train=train, eval=held_out)
    samples = open_data(recipe, "train", make_tokenizer())
    assert samples.label_names == ["eggs", "ham", "spam"]
    assert [samples[i].labels for i in range(4)] == [2, 0, 1, 0]
    assert open_data(recipe, "eval", make_tokenizer())[0].labels == 1
    held_out.write_text(json.dumps({"text": "a", "label": "jam"}))
    with pytest.raises(InputError, match=r"eval\.jsonl:1: label: 'jam' is not a label of data\.train"):
        open_data(recipe, "eval", make_tokenizer())
    streamed = make_recipe(task="sequence-classification", train=train, streaming=True)
    with pytest.raises(InputError, match=r"train\.jsonl:1: label: string labels"):
        open_data(streamed, "train", make_tokenizer())


def test_samples_go_to_the_loaders_processes(tiny_root: Path) -> None:
    """Whole, by pickle: what compares rows stays with the process that opened them."""
    recipe = Recipe.model_validate(recipe_dict(tiny_root))
    samples = open_data(recipe, "train", load_tokenizer(recipe))
    sent = pickle.loads(pickle.dumps(samples))
    assert [sent[at].input_ids for at in range(len(sent))] == [samples[at].input_ids for at in range(len(samples))]
    assert samples.orders(0, {1}).keys() == {1}
