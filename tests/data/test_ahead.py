"""The next micro-batch is on its way while one is computed; never two, and never in another order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import loader_for, resolved_from, train_job
from tiny import recipe_dict
from toolkit.benchmark.job import Order, turn_job
from toolkit.data.ahead import Ahead, feed
from toolkit.data.collate import MicroBatch
from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved
from toolkit.training import loop

Events = list[tuple[str, int, int]]


def window(number: int, micros: int) -> list[MicroBatch]:
    return [
        MicroBatch({"input_ids": torch.tensor([[number, at]])}, [number], 1, 0, number, at, micros)
        for at in range(micros)
    ]


class Fake:
    """Stands for the copies to a GPU; writes down what happens."""

    def __init__(self) -> None:
        self.events: Events = []
        self.on_the_way = self.most = 0

    def begin(self, micro: MicroBatch) -> MicroBatch:
        self.events.append(("begin", micro.window, micro.micro))
        self.on_the_way += 1
        self.most = max(self.most, self.on_the_way)
        return micro

    def arrive(self, micro: MicroBatch) -> MicroBatch:
        self.events.append(("arrive", micro.window, micro.micro))
        self.on_the_way -= 1
        return micro


def gone_through(windows: Iterator[list[MicroBatch]] | list[list[MicroBatch]], fake: Fake) -> Events:
    for read, micros in Ahead(windows, fake):
        for micro, right in zip(micros, read, strict=True):
            assert micro is right
            fake.events.append(("compute", micro.window, micro.micro))
        fake.events.append(("step", read[0].window, 0))
    return fake.events


@pytest.mark.parametrize("sizes", [[1, 1, 1], [3, 2], [1, 4, 1], [2]])
def test_one_is_on_its_way_and_never_two(sizes: list[int]) -> None:
    fake = Fake()
    events = gone_through([window(number, size) for number, size in enumerate(sizes)], fake)
    order = [(number, at) for number, size in enumerate(sizes) for at in range(size)]
    for kind in ("begin", "arrive", "compute"):
        assert [(number, at) for what, number, at in events if what == kind] == order
    assert fake.most == 1
    assert fake.on_the_way == 0
    for here, following in pairwise(order):
        # After the arithmetic of one is queued, before the optimizer step that may follow it.
        at = events.index(("compute", *here))
        assert events[at + 1] == ("begin", *following)


def test_data_that_cannot_be_read_is_reported_at_its_own_turn() -> None:
    def broken() -> Iterator[list[MicroBatch]]:
        yield window(0, 2)
        raise InputError("line 7: no text")

    fake = Fake()
    with pytest.raises(InputError, match="line 7"):
        gone_through(broken(), fake)
    assert fake.events[-1] == ("step", 0, 0)


def test_nothing_to_read() -> None:
    assert gone_through([], Fake()) == []


def test_a_cpu_reads_nothing_ahead() -> None:
    asked: list[int] = []

    def windows() -> Iterator[list[MicroBatch]]:
        for number in range(3):
            asked.append(number)
            yield window(number, 2)

    for number, (read, micros) in enumerate(feed(windows(), torch.device("cpu"))):
        assert [micro.tensors["input_ids"].tolist() for micro in micros] == [[[number, 0]], [[number, 1]]]
        assert asked == list(range(number + 1))
        assert read[0].window == number


@pytest.fixture
def single(tiny_root: Path) -> Resolved:
    return resolved_from(recipe_dict(tiny_root, strategy={"name": "single"}, machine={"processes": 1}))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    monkeypatch.setattr(loop, "feed", lambda windows, device: Ahead(windows, fake))
    return fake


def test_a_run_is_the_same_with_it(single: Resolved, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_job(single, 3)
    fake = as_on_a_gpu(monkeypatch)
    found = train_job(single, 3)
    assert plain is not None
    assert found is not None
    assert fake.most == 1
    assert found.losses == plain.losses
    assert all(weight.equal(plain.weights[name]) for name, weight in found.weights.items())


@pytest.mark.parametrize("warmup", [0, 2])
def test_bench_times_the_steps_it_was_asked_for(single: Resolved, monkeypatch: Any, warmup: int) -> None:
    order = Order(single.recipe.model_dump(mode="json", exclude_unset=True), "recipe", "cpu", steps=3, warmup=warmup)
    plain = turn_job(order)
    as_on_a_gpu(monkeypatch)
    found = turn_job(order)
    for turn in (plain, found):
        assert len(turn.seconds) == len(turn.supervised) == len(turn.losses) == 3
        assert sum(turn.phases.values()) == pytest.approx(sum(turn.seconds), rel=0.2)
    assert (found.supervised, found.losses) == (plain.supervised, plain.losses)


def test_a_run_that_goes_on_is_fed_what_the_whole_run_was(single: Resolved) -> None:
    """What was read ahead when a run ended is read again: the place in the data follows from the step alone."""

    def fed(start: int, steps: int) -> list[list[list[int]]]:
        found = []
        for read, micros in Ahead(loader_for(single, 0, start), Fake()):
            if read[0].window == start + steps:
                break
            found += [micro.tensors["input_ids"].tolist() for micro in micros]
        return found

    assert fed(0, 3) + fed(3, 3) == fed(0, 6)
