"""Several sources as one: exact shares, the same for every number of ranks, without replacement, resumable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cases import every_case
from toolkit.data.loader import TrainLoader, open_data
from toolkit.data.mixture import chosen, epoch_counts, interleaved
from toolkit.data.preflight import check_data
from toolkit.errors import InputError
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe

Make = Callable[..., Recipe]
Write = Callable[..., Path]
WORDS = "abcdef"


@every_case(
    ("sizes", "weights", "proportions", "expected"),
    [
        ([10, 20], [None, None], [None, None], [10, 20]),
        ([10, 20], [2, 0.5], [None, None], [20, 10]),
        ([10, 3], [1, 0.5], [None, None], [10, 2]),
        ([30, 1000], [None, None], [0.3, 0.7], [30, 70]),
        ([7, 7, 7], [None] * 3, [0.5, 0.25, 0.25], [7, 4, 3]),
        ([10, 10, 10], [None] * 3, [1 / 3, 1 / 3, 1 / 3], [10, 10, 10]),
    ],
)
def test_the_counts_of_an_epoch(sizes: list, weights: list, proportions: list, expected: list[int]) -> None:
    assert epoch_counts(sizes, weights, proportions) == expected


def test_shares_are_right_to_the_sample() -> None:
    random = np.random.RandomState(0)
    for _ in range(300):
        shares = random.dirichlet(np.ones(random.randint(2, 6)))
        sizes = random.randint(1, 5000, len(shares))
        counts = epoch_counts(list(sizes), [None] * len(shares), list(shares))
        total = sum(counts)
        assert all(abs(count - share * total) < 1 for count, share in zip(counts, shares, strict=True))
        assert all(count <= size for count, size in zip(counts, sizes, strict=True)), "no sample twice"
        more = [share * (total + 2) > size for share, size in zip(shares, sizes, strict=True)]
        assert any(more), "and no epoch shorter than it has to be"


def test_samples_are_drawn_without_replacement() -> None:
    part, index = chosen([10, 4], [5, 10], seed=3)
    assert Counter(part.tolist()) == {0: 5, 1: 10}
    assert len(set(index[part == 0].tolist())) == 5
    assert set(Counter(index[part == 1].tolist()).values()) == {2, 3}
    again, other = chosen([10, 4], [5, 10], seed=3), chosen([10, 4], [5, 10], seed=4)
    assert (again[1] == index).all()
    assert (other[1] != index).any()
    # In the order that data has without a shuffle, every stretch has the sources' shares.
    assert all(abs(int((part[:at] == 0).sum()) - at / 3) <= 1 for at in range(16))


def test_streams_keep_their_shares_to_the_end() -> None:
    streams = [lambda: iter("a" * 60), lambda: iter("b" * 30)]
    for shares in ([0.5, 0.5], [0.75, 0.25]):
        taken = [part for part, _ in interleaved(streams, shares)]
        for at in range(1, len(taken) + 1):
            assert abs(taken[:at].count(0) - shares[0] * at) <= 1
        assert len(taken) >= (60 if shares[0] == 0.5 else 79)


@pytest.fixture
def mixed(write_jsonl: Write, make_recipe: Make) -> Callable[..., Recipe]:
    files = [
        str(write_jsonl([{"text": letter}] * count, f"{letter}.jsonl")) for letter, count in (("a", 12), ("b", 30))
    ]

    def make(*options: dict[str, Any], **data: Any) -> Recipe:
        train = [{"path": file} | option for file, option in zip(files, options or ({}, {}), strict=True)]
        return make_recipe(train=train, **data)

    return make


def seen(recipe: Recipe, tokenizer: Any, data_size: int, steps: int, start: int = 0, **options: Any) -> list[Counter]:
    """By step, how many samples of each source all ranks together were given (a is 4, b is 5)."""
    loaders = [
        TrainLoader(
            open_data(recipe, "train", tokenizer), recipe, micro_size=4 // data_size, accumulation=1,
            data_size=data_size, data_rank=rank, device_type="cpu", start_window=start, **options,
        )
        for rank in range(data_size)
    ]  # fmt: skip
    counts = [Counter() for _ in range(steps)]
    for loader in loaders:
        for step, window in enumerate(islice(loader, steps)):
            for batch in window:
                counts[step].update(int(i) for row in batch.tensors["input_ids"] for i in row if int(i) in (4, 5))
    return counts


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_is_the_same_for_every_number_of_ranks_and_from_every_step(
    mixed: Callable[..., Recipe], make_tokenizer: Any, shuffle: bool
) -> None:
    recipe = mixed({"proportion": 0.4}, {"proportion": 0.6}, shuffle=shuffle, workers=0)
    tokenizer = make_tokenizer()
    samples = open_data(recipe, "train", tokenizer)
    assert len(samples) == 30
    assert "data.train: 12 of 12 samples of" in " ".join(samples.notes)
    assert "(40.0%)" in " ".join(samples.notes)
    straight = seen(recipe, tokenizer, 1, 16)
    assert sum(straight[:8], Counter()) == {4: 12, 5: 18}
    assert sum(straight[8:], Counter()) == {4: 12, 5: 18}
    assert seen(recipe, tokenizer, 2, 16) == straight
    assert seen(recipe, tokenizer, 1, 5, start=11) == straight[11:]
    assert (straight[:8] == straight[8:]) is not shuffle


def test_a_packed_mixture_has_the_same_shares(mixed: Callable[..., Recipe], make_tokenizer: Any) -> None:
    recipe = mixed({"weight": 2}, {"weight": 0.5}, packing=True, max_length=6, workers=0)
    tokenizer = make_tokenizer()
    loader = TrainLoader(open_data(recipe, "train", tokenizer), recipe, micro_size=4, accumulation=1, data_size=1,
                         data_rank=0, device_type="cpu")  # fmt: skip
    assert loader.steps_per_epoch is not None
    counts = seen(recipe, tokenizer, 1, loader.steps_per_epoch)
    assert sum(counts, Counter()) == {4: 24, 5: 15}
    entries = open_data(recipe, "train", tokenizer)
    assert Counter(entries[i].input_ids[0] for i in range(len(entries))) == {4: 24, 5: 15}


def test_a_stream_of_several_sources(mixed: Callable[..., Recipe], make_tokenizer: Any) -> None:
    recipe = mixed({"proportion": 0.5}, {"proportion": 0.5}, streaming=True, workers=0, shuffle=False)
    tokenizer = make_tokenizer()
    straight = seen(recipe, tokenizer, 1, 6)
    assert sum(straight, Counter()) == {4: 12, 5: 12}
    assert seen(recipe, tokenizer, 2, 6) == straight
    assert seen(recipe, tokenizer, 1, 2, start=4) == straight[4:]


def test_sources_have_names_of_their_own(write_jsonl: Write, make_recipe: Make, make_tokenizer: Any) -> None:
    first = str(write_jsonl([{"text": "a"}], "a.jsonl"))
    second = str(write_jsonl([{"body": "b"}], "b.jsonl"))
    recipe = make_recipe(train=[{"path": first}, {"path": second, "fields": {"text": "body"}}])
    check_data(recipe)
    samples = open_data(recipe, "train", make_tokenizer())
    assert [samples[i].input_ids[0] for i in range(2)] == [4, 5]
    with pytest.raises(InputError, match=r"b\.jsonl:1: text: missing"):
        check_data(make_recipe(train=[{"path": first}, {"path": second}]))


@every_case(
    ("train", "data", "message"),
    [
        ([{"path": "a.jsonl", "weight": 0}], {}, "data.train.0.weight: input should be greater than 0"),
        ([], {}, "data.train: list should have at least 1 item"),
        ([{"paht": "a.jsonl"}], {}, "data.train.0.path: missing"),
        ([{"path": "a.jsonl", "proportion": 0.5}, {"path": "a.jsonl"}], {},
         "data: `train[1]` has no proportion, but another source has one"),
        ([{"path": "a.jsonl", "proportion": 0.5}], {}, "data: the proportions of `train` add up to 0.5, not 1"),
        ([{"path": "a.jsonl", "proportion": 1.0, "weight": 1.0}], {}, "data: give `train`'s sources weights or"),
        ([{"path": "a.jsonl"}], {"streaming": True}, "data: a stream of several sources needs a `proportion`"),
        ([{"path": "empty.jsonl"}], {}, "data.train[0]: empty.jsonl is empty"),
        ([{"path": "a.jsonl"}, {"path": "b.jsonl"}], {}, "data.train[1]: b.jsonl does not exist"),
        ([{"path": "a.jsonl", "split": "test"}], {}, "data.train[0].split: only hub data sets have one"),
    ],
)  # fmt: skip
def test_what_cannot_be_mixed_is_an_error_with_its_key(
    train: list, data: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("empty.jsonl").write_text("")
    recipe = {"model": {"config": {"model_type": "llama"}}, "data": {"train": train} | data, "run": {"max_steps": 1}}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(InputError) as caught:
        check_data(load_recipe("r.yaml"))
    assert message in str(caught.value)


def test_a_share_below_one_sample_is_refused(mixed: Callable[..., Recipe], make_tokenizer: Any) -> None:
    with pytest.raises(
        InputError, match=r"data\.train\[0\]: .*a\.jsonl: its share of an epoch is less than one sample"
    ):
        open_data(mixed({"weight": 0.01}, {}), "train", make_tokenizer())
