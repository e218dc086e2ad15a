"""What padding costs is what the loader makes: every number is compared with its batches, of all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases import every_case
from inspection.conftest import Look, Resolve
from toolkit.data.collate import MicroBatch
from toolkit.data.loader import TrainLoader, eval_batches, open_data
from toolkit.recipe.resolve import Resolved

Write = Callable[..., Path]


def ragged(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices("abcdef", k=draw.randint(1, 11))) for _ in range(count)]


def epoch(resolved: Resolved, samples: Any) -> tuple[int, list[MicroBatch]]:
    """Steps of the first epoch, and its micro-batches of all ranks."""
    found: list[MicroBatch] = []
    steps = 0
    for rank in range(resolved.data_size):
        loader = TrainLoader(
            samples,
            resolved.recipe,
            micro_size=resolved.micro_size,
            accumulation=resolved.accumulation,
            data_size=resolved.data_size,
            data_rank=rank,
            device_type="cpu",
        )
        steps = 0
        for window in loader:
            if window[0].epoch:
                break
            steps += 1
            found += window
    return steps, found


def computed(micros: list[MicroBatch], task: str) -> list[int]:
    names = ("input_ids", "labels") if task == "seq2seq-lm" else ("input_ids",)
    return [sum(micro.tensors[name].numel() for name in names) for micro in micros]


CASES = {
    "plain": {},
    "grouped": {"group_by_length": True},
    "packed": {"packing": True},
    "packed for flash attention": {"packing": True, "attention": "flash_attention_2"},
    "in order": {"shuffle": False},
    "packed in order": {"packing": True, "shuffle": False},
    "streamed": {"streaming": True},
    "streamed and packed": {"streaming": True, "packing": True},
    "three ranks": {"processes": 3, "micro": 3},
    "three ranks, packed": {"processes": 3, "packing": True},
    "three ranks, grouped": {"processes": 3, "group_by_length": True},
    "three ranks, streamed": {"processes": 3, "streaming": True},
    "seq2seq": {"task": "seq2seq-lm", "format": "prompt-completion"},
    "seq2seq, grouped": {"task": "seq2seq-lm", "format": "prompt-completion", "group_by_length": True},
    "classes": {"task": "sequence-classification"},
}


@every_case("case", CASES.values(), ids=CASES)
def test_the_padding_is_the_loaders(
    case: dict[str, Any],
    resolved_of: Resolve,
    look: Look,
    make_tokenizer: Any,
    write_jsonl: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small that a stream is read in parts here as well.
    monkeypatch.setattr("toolkit.data.stream.SHUFFLE_BUFFER", 8)
    monkeypatch.setattr("toolkit.data.packing.HELD_ROWS", 2)
    rows: list[Any] = [{"text": text, "label": number % 2} for number, text in enumerate(ragged(53))]
    if case.get("format"):
        rows = [{"prompt": a, "completion": b} for a, b in zip(ragged(53), ragged(53, 1), strict=True)]
    case = {"train": write_jsonl(rows), "max_length": 9, **case}
    resolved, tokenizer = resolved_of(**case), make_tokenizer()
    found = look(tokenizer, **case)
    samples = open_data(resolved.recipe, "train", tokenizer)
    steps, micros = epoch(resolved, samples)
    tokens = computed(micros, resolved.recipe.model.task)
    [own] = [way for way in found.arrangements if way.recipe]
    assert own.steps == found.fields["steps_per_epoch"] == steps
    assert own.computed_tokens == sum(tokens)
    assert own.largest_micro_batch == max(tokens)
    assert own.rows == sum(len(micro.tensors["input_ids"]) for micro in micros if micro.sample_ids)
    assert found.fields["supervised"] == sum(micro.supervised for micro in micros)
    real = found.fields["tokens"]
    if "attention_mask" in micros[0].tensors and resolved.recipe.model.task != "seq2seq-lm":
        dummies = 2 * sum(not micro.sample_ids for micro in micros)
        assert real == sum(int(micro.tensors["attention_mask"].sum()) for micro in micros) - dummies
    assert (own.padding_tokens, own.padding_share) == (sum(tokens) - real, (sum(tokens) - real) / sum(tokens))


def test_evaluation_neither_shuffles_nor_packs(
    resolved_of: Resolve, look: Look, make_tokenizer: Any, write_jsonl: Write
) -> None:
    train = write_jsonl([{"text": "a b"}])
    held_out = write_jsonl([{"text": text} for text in ragged(29, 2)], "eval.jsonl")
    for case in ({"packing": True}, {"group_by_length": True}, {"processes": 2}, {"streaming": True}):
        case = {"train": train, "eval": held_out, "max_length": 9, **case}
        resolved, tokenizer = resolved_of(**case), make_tokenizer()
        found = look(tokenizer, "eval", **case)
        samples = open_data(resolved.recipe, "eval", tokenizer)
        batches = [
            list(eval_batches(samples, resolved.recipe, resolved.micro_size, resolved.data_size, rank, "cpu"))
            for rank in range(resolved.data_size)
        ]
        tokens = computed([micro for rank in batches for micro in rank], "causal-lm")
        [way] = found.arrangements
        assert (way.steps, way.computed_tokens) == (len(batches[0]), sum(tokens)), case
        assert way.largest_micro_batch == max(tokens)


def test_the_ways_are_ordered_as_they_should_be(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"text": text} for text in ragged(200)])
    plain, grouped, packed = look(make_tokenizer(), train=train, max_length=12).arrangements
    assert plain.recipe
    assert plain.padding_share > grouped.padding_share > packed.padding_share
    assert plain.steps == grouped.steps > packed.steps
    again = look(make_tokenizer(), train=train, max_length=12, packing=True).arrangements
    assert [way.computed_tokens for way in again] == [way.computed_tokens for way in (plain, grouped, packed)]
    assert [way.recipe for way in again] == [False, False, True]


def test_what_a_recipe_cannot_use_has_its_reason(look: Look, make_tokenizer: Any, write_jsonl: Write) -> None:
    train = write_jsonl([{"text": "a b", "label": 0}, {"text": "a", "label": 1}])
    ways = look(make_tokenizer(), train=train, task="sequence-classification").arrangements
    assert [way.reason is None for way in ways] == [True, True, False]
    assert "causal-lm" in (ways[2].reason or "")
    ways = look(make_tokenizer(), train=train, streaming=True).arrangements
    assert "not known in advance" in (ways[1].reason or "")


def test_a_mixture_is_counted_as_often_as_an_epoch_has_it(
    resolved_of: Resolve, look: Look, make_tokenizer: Any, write_jsonl: Write
) -> None:
    one = write_jsonl([{"text": text} for text in ragged(20)], "one.jsonl")
    two = write_jsonl([{"text": text} for text in ragged(30, 1)], "two.jsonl")
    sources = [{"path": str(one), "weight": 2.5}, {"path": str(two), "weight": 0.5}]
    tokenizer = make_tokenizer()
    found = look(tokenizer, train=sources, max_length=9)
    resolved = resolved_of(train=sources, max_length=9)
    samples = open_data(resolved.recipe, "train", tokenizer)
    _, micros = epoch(resolved, samples)
    assert found.fields["samples"] == len(samples) == 65
    assert found.arrangements[0].computed_tokens == sum(computed(micros, "causal-lm"))
    assert found.fields["supervised"] == sum(micro.supervised for micro in micros)
    assert found.fields["tokens"] == int(np.sum(samples.lengths()))
    first, second = found.fields["sources"]
    assert (first["samples"], first["samples_per_epoch"]) == (20, 50)
    assert (second["samples"], second["samples_per_epoch"]) == (30, 15)
    assert first["share_of_samples"] == pytest.approx(50 / 65)
    assert first["supervised"] + second["supervised"] == found.fields["supervised"]
    mine = [number for number, part in enumerate(samples.part) if part == 0]  # type: ignore[union-attr]
    by_hand = sum(len(samples[number].input_ids) - 1 for number in mine)
    assert first["supervised"] == by_hand
    assert first["share_of_supervised"] == pytest.approx(by_hand / found.fields["supervised"])
