"""A plan with the frozen weights of some blocks whole: as many as fit, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plan.test_command import BIG, planned

GIB = 2**30


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(BIG | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}))
    return str(path)


def test_a_plan_has_the_most_blocks_whole_that_fit(tmp_path: Path, config: str) -> None:
    """A 7B base in bf16 has 12 GiB: whole it does not fit, a half of it leaves memory free."""
    options = {"gpu": "h100", "memory": 11.0, "gpus": 2, "lora": 8, "length": 512}
    _, found = planned(tmp_path, config, **options)
    fitting = [c for c in found["candidates"] if c["fits"]]
    assert fitting
    assert all(c["strategy"] in ("fsdp1", "fsdp2", "zero3") for c in fitting)
    chosen = found["candidates"][found["chosen"]]
    assert 0 < chosen["unsharded_blocks"] < 32
    [without] = [
        c for c in fitting
        if c["unsharded_blocks"] is None
        and all(c[key] == chosen[key] for key in ("strategy", "sync", "reshard_after_forward", "micro_size",
                                                  "activation_checkpointing", "offload", "loss"))
    ]  # fmt: skip
    assert chosen["seconds_per_step"] < without["seconds_per_step"]
    # One more block would not fit: half of its frozen weights more, beside what it need not gather.
    block = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    per_block = (chosen["peak_bytes"] - without["peak_bytes"]) / chosen["unsharded_blocks"]
    assert 0.8 * block / 2 < per_block <= 1.01 * block / 2
    assert chosen["peak_bytes"] + per_block > 0.95 * 11 * GIB  # 5 % are left free


def test_where_all_weights_fit_whole_none_is_tried(tmp_path: Path, config: str) -> None:
    _, found = planned(tmp_path, config, gpu="h100", gpus=2, lora=8, length=512)
    assert {c["unsharded_blocks"] for c in found["candidates"]} == {None}
