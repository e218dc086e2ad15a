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
from toolkit.rooms import host_options
from toolkit.strategies import strategies


def way(
    name: str, gib: float, seconds: float | None, micro: int = 1, kind: str = "none", offload: str = "none",
    asked: bool = False,
) -> Candidate:  # fmt: skip
    """A candidate of 80 GiB devices with only what a choice reads."""
    strategy = SimpleNamespace(name=name, offload=offload, sync=None, reshard_after_forward=True)
    off = {option.key: option.off_value for option in host_options()}
    recipe = SimpleNamespace(strategy=strategy, activation_checkpointing=kind, loss="plain", **off)
    resolved = cast(
        Any, SimpleNamespace(recipe=recipe, micro_size=micro, whole_blocks=0, traits=strategies()[name].traits)
    )
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


PLAIN = ("strategy.name=fsdp2", "batch.accumulation=8", "activation_checkpointing=none")
KEPT = (*PLAIN, "strategy.sync=last", "strategy.reshard_after_forward=false")


def test_weights_are_kept_gathered_where_memory_allows(tmp_path: Path) -> None:
    """`fsdp2` gathers a frozen base twice for every micro-batch, or once per step; what it takes is counted."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(BIG))
    _, result = planned(tmp_path, str(config), gpu="a100-40gb", gpus=8, lora=8, overrides=PLAIN)
    asked = next(c for c in result["candidates"] if c["asked"])
    same = [c for c in result["candidates"] if c["strategy"] == "fsdp2" and c["micro_size"] == asked["micro_size"]]
    kept = next(c for c in same if not c["reshard_after_forward"] and c["activation_checkpointing"] == "none")
    assert kept["sync"] == "last"
    assert asked["reshard_after_forward"]
    # Each of eight micro-batches gathers twice: once in place of sixteen times.
    assert kept["sent_bytes"]["all"] < asked["sent_bytes"]["all"] / 12
    assert kept["seconds_per_step"] < asked["seconds_per_step"]
    assert kept["peak_bytes"] > asked["peak_bytes"]


@pytest.mark.nightly
def test_kept_weights_that_do_not_fit_are_sharded_again(tmp_path: Path) -> None:
    config = str(tmp_path / "config.json")
    Path(config).write_text(json.dumps(BIG))
    peaks = []
    for overrides in (PLAIN, KEPT):
        _, found = planned(tmp_path, config, gpu="a100-40gb", gpus=8, lora=8, overrides=overrides)
        peaks.append(found["candidates"][0]["peak_bytes"])
    between = sum(peaks) / 2 / 0.95 / GIB
    _, result = planned(tmp_path, config, memory=between, gpus=8, lora=8, overrides=KEPT)
    assert not result["candidates"][0]["fits"]
    way = {"strategy": "fsdp2", "activation_checkpointing": "none", "micro_size": 1, "reshard_after_forward": True}
    sharded = next(c for c in result["candidates"] if way.items() <= c.items())
    assert (sharded["sync"], sharded["fits"]) == (None, True)
