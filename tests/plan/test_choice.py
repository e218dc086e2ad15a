"""Which way a plan chooses, and what it says it went by."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from plan.test_command import BIG, planned
from toolkit.planning.candidate import Candidate
from toolkit.planning.choice import FASTEST, ROOMIEST, SIMPLEST, choose, why_chosen
from toolkit.planning.hardware import GIB
from toolkit.planning.memory import Memory
from toolkit.planning.time import Seconds
from toolkit.strategies import strategies


def way(
    name: str, gib: float, seconds: float | None, micro: int = 1, kind: str = "none", offload: str = "none",
    asked: bool = False,
) -> Candidate:  # fmt: skip
    """A candidate of 80 GiB devices with only what a choice reads."""
    strategy = SimpleNamespace(name=name, offload=offload)
    recipe = SimpleNamespace(strategy=strategy, activation_checkpointing=kind, loss="plain", activation_offload=False)
    resolved = cast(Any, SimpleNamespace(recipe=recipe, micro_size=micro, traits=strategies()[name].traits))
    memory = Memory(peak=int(gib * GIB))
    time = None if seconds is None else Seconds(seconds, 0.0, 0.0, 0.0, 0.0)
    return Candidate(resolved, memory, 0, 0, time, 80 * GIB, 76 * GIB, asked)


@pytest.mark.parametrize(
    ("ways", "index", "why"),
    [
        # the larger micro-batch is as fast: 40 GiB for nothing
        ([way("zero2", 72.6, 1.0, micro=2), way("zero2", 31.9, 1.0)], 1, ROOMIEST),
        ([way("zero2", 72.6, 1.0, micro=2), way("zero2", 31.9, 1.009)], 1, ROOMIEST),
        ([way("zero2", 72.6, 1.0, micro=2), way("zero2", 31.9, 1.02)], 0, FASTEST),
        ([way("zero2", 77.0, 1.0, micro=2), way("zero2", 31.9, 1.02)], 1, FASTEST),
        # equal on the screen: the plainer one
        ([way("zero3", 20.01, 1.0), way("fsdp2", 20.02, 1.0)], 1, ROOMIEST),
        # recomputation that is not needed to fit does not compete, unless it was asked for
        ([way("zero2", 30, 1.0), way("zero2", 20, 1.0, kind="full")], 0, FASTEST),
        ([way("zero2", 20, 1.0, kind="full", asked=True), way("zero2", 30, 1.0)], 0, ROOMIEST),
        ([way("zero2", 77, 1.0), way("zero2", 20, 1.1, kind="full")], 1, FASTEST),
        # without times: the plainest, and the largest micro-batch of it
        ([way("zero3", 10, None), way("ddp", 20, None), way("ddp", 30, None, micro=2)], 2, SIMPLEST),
    ],
)  # fmt: skip
def test_the_choice_and_its_reason(ways: list[Candidate], index: int, why: str) -> None:
    chosen = choose(ways)
    assert chosen is ways[index]
    assert why_chosen(ways, chosen) == why


def test_a_chain_of_near_equals_does_not_drift_from_the_fastest() -> None:
    """Each is within 1 % of the next, and each needs less memory: only those within 1 % of the fastest compete."""
    chain = [way("zero2", 70 - 5 * n, 1.008**n, micro=2**n) for n in range(6)]
    for seed in range(20):
        random.Random(seed).shuffle(chain)
        chosen = choose(chain)
        assert chosen is not None
        assert chosen.resolved.micro_size == 2


def test_nothing_fits() -> None:
    assert choose([way("ddp", 100, 1.0)]) is None


def test_a_plan_takes_the_roomiest_of_equals_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, page = str(tmp_path / "config.json"), tmp_path / "plan.html"
    Path(config).write_text(json.dumps(BIG))
    options: dict[str, Any] = {"gpu": "h100", "length": 1024, "lora": 8, "page": str(page)}
    _, result = planned(tmp_path, config, **options)
    candidates, chosen = result["candidates"], result["candidates"][result["chosen"]]
    fastest = min(c["seconds_per_step"] for c in candidates if c["fits"])
    equal = [c for c in candidates if c["fits"] and c["seconds_per_step"] <= 1.01 * fastest]
    assert len({c["micro_size"] for c in equal}) > 1
    assert chosen["peak_bytes"] == min(c["peak_bytes"] for c in equal)
    assert result["chosen_because"] == ROOMIEST
    assert f"← {ROOMIEST}" in capsys.readouterr().out
    assert ROOMIEST in page.read_text()
    _, every = planned(tmp_path, config, every=True, **options)
    again = every["candidates"][every["chosen"]]
    assert [again[key] for key in ("strategy", "offload", "activation_checkpointing", "micro_size")] == [
        chosen[key] for key in ("strategy", "offload", "activation_checkpointing", "micro_size")
    ]
