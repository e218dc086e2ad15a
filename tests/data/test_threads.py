"""Samples made by several threads are those of one, in order, and so are their errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.data import samples as module
from toolkit.data.loader import TrainLoader, open_data
from toolkit.data.threads import ordered_map, thread_count
from toolkit.errors import InputError
from toolkit.recipe.schema import Recipe


def test_results_are_in_order_and_made_by_threads() -> None:
    def slow_at_first(number: int) -> tuple[int, str]:
        time.sleep(0.002 if number < 40 else 0.0)
        return number, threading.current_thread().name

    found = list(ordered_map(slow_at_first, range(500), 3))
    assert [number for number, _ in found] == list(range(500))
    names = {name for _, name in found[1:]}
    assert found[0][1] == threading.current_thread().name  # what is made once is made before there are threads
    assert len(names) > 1
    assert all(name.startswith("tokenise") for name in names)
    assert list(ordered_map(slow_at_first, [], 3)) == []


def test_an_error_comes_in_its_turn() -> None:
    def fails(number: int) -> int:
        if number == 100:
            raise ValueError("at 100")
        return number

    seen: list[int] = []
    with pytest.raises(ValueError, match="at 100"):
        seen.extend(ordered_map(fails, range(1000), 4))
    assert seen == list(range(100))


def test_what_cannot_be_read_comes_after_what_could() -> None:
    def items() -> Iterator[int]:
        yield from range(50)
        raise ValueError("unreadable")

    seen: list[int] = []
    with pytest.raises(ValueError, match="unreadable"):
        seen.extend(ordered_map(int, items(), 4))
    assert seen == list(range(50))

    def fails(number: int) -> int:
        raise KeyError(number)

    with pytest.raises(KeyError):  # of the first item, though all have been read
        list(ordered_map(fails, items(), 4))


def test_threads_end_with_who_takes() -> None:
    taking = ordered_map(lambda number: number, range(10**6), 4)
    assert next(taking) == 0
    assert next(taking) == 1
    taking.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("tokenise")]


def test_each_process_of_a_node_takes_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.data.threads.cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (thread_count(alone=False), thread_count(alone=True)) == (4, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert thread_count(alone=False) == 1


def _recipe(train: Any, **data: Any) -> Recipe:
    return Recipe.model_validate({
        "model": {"config": {"model_type": "llama"}}, "run": {"max_steps": 1},
        "data": {"train": train, "cache": False, "packing": True, "max_length": 64, "workers": 0} | data,
    })  # fmt: skip


def _tokenizer(tiny_root: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_root / "tokenizer")


@pytest.fixture
def ragged(tmp_path: Path) -> Path:
    lines = [{"text": " ".join(["loss of a rank"] * (1 + number * 7 % 19)) + f" {number}"} for number in range(300)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("streaming", [False, True])
def test_the_samples_are_those_of_one_thread(
    streaming: bool, ragged: Path, tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for threads in (1, 4):
        started: list[int] = []

        def watched(function: Any, items: Any, count: int, started: list[int] = started) -> Any:
            started.append(count)
            return ordered_map(function, items, count)

        for place in (module, __import__("toolkit.data.stream", fromlist=["x"])):
            monkeypatch.setattr(place, "ordered_map", watched)
            monkeypatch.setattr(place, "thread_count", lambda alone, threads=threads: threads)
        recipe = _recipe(str(ragged), streaming=streaming)
        opened = open_data(recipe, "train", _tokenizer(tiny_root))
        loader = TrainLoader(opened, recipe, micro_size=2, accumulation=1, data_size=1, data_rank=0, device_type="cpu")
        micros = [micro for _, [micro] in zip(range(30), loader, strict=False)]
        found.append([{name: tensor.tolist() for name, tensor in micro.tensors.items()} for micro in micros])
        assert started == [threads]
    assert found[0] == found[1]
    assert len(found[0]) == 30


def test_the_first_bad_row_is_reported(ragged: Path, tiny_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ragged.read_text().splitlines()
    lines[70], lines[75] = '{"text": 5}', "{not JSON"
    ragged.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(module, "thread_count", lambda alone: 4)
    with pytest.raises(InputError, match=r"train\.jsonl:71: .*text"):
        open_data(_recipe(str(ragged)), "train", _tokenizer(tiny_root))
