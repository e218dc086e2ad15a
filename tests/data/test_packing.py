"""Packed samples: each once, rows full, none sees another; the same loss and gradients as samples apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_loader import first, ids

from toolkit.data import packing
from toolkit.data.collate import MicroBatch, Slot, collate
from toolkit.data.formats import Example
from toolkit.data.loader import TrainLoader, open_data
from toolkit.data.packing import by_length, pack, packed_rows, packed_stream
from toolkit.recipe.schema import Recipe
from toolkit.tasks.labels import IGNORED

Make = Callable[..., Recipe]
Write = Callable[..., Path]
STYLES = [{"streaming": False}, {"streaming": True}]


def log_normal(count: int, seed: int = 0) -> list[int]:
    """Lengths of ragged text: median 70 tokens, sigma 0.6, cut at 512."""
    draw = random.Random(seed)
    return [min(512, max(2, round(draw.lognormvariate(4.2485, 0.6)))) for _ in range(count)]


def test_every_sample_is_in_one_row_and_no_row_is_too_long() -> None:
    lengths = log_normal(2000)
    rows = pack(lengths, 512)
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 512


@pytest.mark.parametrize("capacity", [512, 1024, 4096])
def test_padding_stays_under_two_percent(capacity: int) -> None:
    lengths = log_normal(20_000)
    packed = packed_rows(lengths, capacity, seed=1, shuffle=True)
    streamed = list(packed_stream(lengths, lambda n: n, capacity, np.random.RandomState(0)))
    for rows in (len(packed), len(streamed)):
        assert 1 - sum(lengths) / (rows * capacity) < 0.02
    assert sorted(n for row in streamed for n in row) == sorted(lengths)


def test_lengths_that_cannot_be_combined_are_not_held_back_for_ever() -> None:
    rows = list(islice(packed_stream(iter([6] * 10**6), lambda n: n, 10, None), 300))
    assert [len(row) for row in rows] == [1] * 300


def test_without_shuffle_rows_keep_the_order_of_their_samples() -> None:
    rows = packed_rows([4, 4, 4, 2, 2, 1], 6, seed=0, shuffle=False)
    assert rows == [[0, 5], [1, 4], [2, 3]]


@pytest.fixture
def train(write_jsonl: Write) -> Path:
    words = random.Random(0)
    return write_jsonl([{"text": " ".join(words.choices("abcdef", k=words.randint(2, 9)))} for _ in range(61)])


def loader(recipe: Recipe, tokenizer: Any, rank: int = 0, **options: Any) -> TrainLoader:
    options = {"micro_size": 2, "accumulation": 2, "data_size": 2, "device_type": "cpu", **options}
    return TrainLoader(open_data(recipe, "train", tokenizer), recipe, data_rank=rank, **options)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_every_sample_once(
    make_recipe: Make, make_tokenizer: Any, train: Path, style: dict, shuffle: bool
) -> None:
    recipe = make_recipe(train=train, packing=True, max_length=24, shuffle=shuffle, **style)
    ranks = [first(loader(recipe, make_tokenizer(), rank), 12) for rank in range(2)]
    for epoch in range(2):
        seen = [i for rank in ranks for window in rank for batch in window if batch[3] == epoch for i in batch[1]]
        assert sorted(seen) == list(range(61))
    steps = loader(recipe, make_tokenizer()).steps_per_epoch
    epochs = [[window[0][3] for window in rank].count(0) for rank in ranks]
    assert epochs[0] == epochs[1]
    assert steps is None if style["streaming"] else steps == epochs[0]


@pytest.mark.parametrize("style", STYLES)
def test_resuming_goes_on_as_if_never_stopped(
    make_recipe: Make, make_tokenizer: Any, train: Path, style: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "HELD_ROWS", 4)  # several stretches in an epoch
    recipe = make_recipe(train=train, packing=True, max_length=24, seed=3, **style)
    whole = first(loader(recipe, make_tokenizer(), 1), 12)
    for start in (1, 3, 5, 8):
        assert first(loader(recipe, make_tokenizer(), 1, start_window=start), 4) == whole[start : start + 4], start


def test_ranks_do_not_change_what_shares_a_step(make_recipe: Make, make_tokenizer: Any, train: Path) -> None:
    recipe = make_recipe(train=train, packing=True, max_length=24, seed=3)
    alone = first(loader(recipe, make_tokenizer(), micro_size=8, accumulation=1, data_size=1), 6)
    four = [
        first(loader(recipe, make_tokenizer(), rank, micro_size=1, accumulation=2, data_size=4), 6) for rank in range(4)
    ]
    together = [sorted(i for rank in four for i in ids(rank)[step]) for step in range(6)]
    assert [sorted(window) for window in ids(alone)] == together


def test_the_tensors_of_packed_rows() -> None:
    examples = [Example([5, 6, 7], [5, 6, 7]), Example([8], [8]), Example([9, 4], [IGNORED, 4])]
    micro = collate(examples, Slot([0, 1, 2], 0, 0, 0, 1, (2, 1)), "causal-lm", 0)
    assert {name: tensor.tolist() for name, tensor in micro.tensors.items()} == {
        "input_ids": [[5, 6, 7, 8], [9, 4, 0, 0]],
        "position_ids": [[0, 1, 2, 0], [0, 1, 0, 0]],
        "labels": [[IGNORED, 6, 7, IGNORED], [IGNORED, 4, IGNORED, IGNORED]],
    }
    assert micro.supervised == int((micro.tensors["labels"][:, 1:] != IGNORED).sum()) == 3


def test_flash_attention_gets_one_row_without_padding(make_recipe: Make, make_tokenizer: Any, train: Path) -> None:
    recipe = make_recipe(train=train, packing=True, max_length=24)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": "flash_attention_2"})})
    for window in islice(loader(recipe, make_tokenizer()), 3):
        for micro in window:
            assert micro.tensors["input_ids"].shape[0] == 1
            assert int((micro.tensors["position_ids"] == 0).sum()) == len(micro.sample_ids)


def test_grouped_by_length_changes_no_step_and_pads_less(make_recipe: Make, make_tokenizer: Any, train: Path) -> None:
    plain, grouped = (
        [list(islice(loader(make_recipe(train=train, **style), make_tokenizer(), rank, accumulation=4), 4))
         for rank in range(2)]
        for style in ({}, {"group_by_length": True})
    )  # fmt: skip

    def steps(ranks: list[list[list[MicroBatch]]]) -> list[list[int]]:
        return [sorted(i for rank in ranks for micro in rank[step] for i in micro.sample_ids) for step in range(4)]

    def padding(ranks: list[list[list[MicroBatch]]]) -> int:
        return sum(int((m.tensors["attention_mask"] == 0).sum()) for rank in ranks for window in rank for m in window)

    assert steps(plain) == steps(grouped)
    assert padding(grouped) < 0.5 * padding(plain)
    assert by_length([0, 1, 2], [3, 9, 5]) == [1, 2, 0]


# --------------------------------------------------------------------------- equal, and a leak is seen

_NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _NARROW,
    "qwen2": _NARROW | {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32,
             "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "mistral": _NARROW | {"sliding_window": 6},
    "gemma": _NARROW | {"head_dim": 8},
    "gemma3_text": _NARROW | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention",
                              "full_attention"]},
}  # fmt: skip
NOISE = 2e-6
"""Relative, per tensor: two correct runs of the same samples in other shapes differ by up to 4e-7 here (fp32's epsilon
is 1.2e-7); a leak on purpose changes tensors by 1e-2 and more."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.config.use_cache = False  # as toolkit/model/load.py does: with a cache, positions tell no samples apart
    return model


def gradients(model: torch.nn.Module, micros: list[MicroBatch]) -> tuple[float, dict[str, torch.Tensor]]:
    from toolkit.training.loss import loss_sum

    model.zero_grad()
    total = 0.0
    for micro in micros:
        loss = loss_sum(model, model.config, micro.tensors, "causal-lm")
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(model: torch.nn.Module, apart: list[MicroBatch], packed: list[MicroBatch]) -> float:
    loss, right = gradients(model, apart)
    other, seen = gradients(model, packed)
    errors = [((seen[n] - g).norm() / g.norm()).item() for n, g in right.items() if g.norm() > 1e-4]
    return max(*errors, abs(other - loss) / loss)


def samples() -> list[Example]:
    draw = random.Random(1)
    found = []
    for length in (9, 4, 14, 1, 7, 11):
        tokens = draw.choices(range(3, 64), k=length)
        found.append(Example(tokens, [IGNORED] * (length // 3) + tokens[length // 3 :]))
    return found


def test_packed_is_equal_to_apart_and_a_leak_is_not(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    examples = samples()
    apart = [collate([e], Slot([i], 0, 0, 0, 1), "causal-lm", 0) for i, e in enumerate(examples)]
    packed = [collate(examples, Slot(list(range(6)), 0, 0, 0, 1, (3, 3)), "causal-lm", 0)]
    assert sum(m.supervised for m in apart) == packed[0].supervised
    assert difference(model, apart, packed) < NOISE
    # Positions that go on: another sample's tokens stand before, and are seen.
    tensors = packed[0].tensors
    running = torch.arange(tensors["input_ids"].shape[1]).expand_as(tensors["input_ids"])
    leaking = [MicroBatch(tensors | {"position_ids": running}, [], 0, 0, 0, 0, 1)]
    assert difference(model, apart, leaking) > 1e-2
    # The positions right, the mask without blocks.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    assert difference(model, apart, packed) > 1e-2


@pytest.mark.upstream
def test_a_cache_lets_packed_samples_see_each_other(model: torch.nn.Module) -> None:
    """transformers 5.23: why toolkit/model/load.py turns it off. Where this fails, docs/speed.md is out of date."""
    examples = samples()
    apart = [collate([e], Slot([i], 0, 0, 0, 1), "causal-lm", 0) for i, e in enumerate(examples)]
    packed = [collate(examples, Slot(list(range(6)), 0, 0, 0, 1, (3, 3)), "causal-lm", 0)]
    model.config.use_cache = True
    try:
        assert difference(model, apart, packed) > 1e-2
    finally:
        model.config.use_cache = False
