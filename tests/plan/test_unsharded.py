"""A plan with the frozen weights of some blocks whole: as many as fit, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plan.test_command import BIG, planned
from toolkit.errors import InputError
from toolkit.planning.allocator import HIGH
from toolkit.planning.candidate import Candidate
from toolkit.planning.search import Search
from toolkit.recipe.load import load_recipe
from toolkit.recipe.resolve import Resolved

GIB = 2**30


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(BIG | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}))
    return str(path)


def test_a_plan_has_the_most_blocks_whole_that_fit(tmp_path: Path, config: str) -> None:
    """A 7B base in bf16 has 12 GiB: whole it does not fit, a half of it leaves memory free."""
    options = {"gpu": "h100", "memory": 14.0, "gpus": 2, "lora": 8, "length": 256}
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
    assert chosen["needed_bytes"] + HIGH * per_block > 14 * GIB


@pytest.mark.parametrize(
    ("loop", "blocks", "message"),
    [
        ("toolkit", 33, "unsharded_blocks: 33, but the model has 32 blocks"),
        ("trainer", 4, "has no strategy.unsharded_blocks; plan it with strategy.unsharded_blocks=null"),
    ],
)
def test_what_a_plan_cannot_have_is_refused(loop: str, blocks: int, message: str, tmp_path: Path, config: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {Path(config).parent}}}\nadapter: {{method: lora, r: 8}}\nprecision: bf16\n"
        "data: {train: none, max_length: 512}\nbatch: {micro_size: 1}\nrun: {output_dir: runs, max_steps: 1}\n"
        f"machine: {{device: cuda, processes: 2}}\nstrategy: {{name: fsdp2, unsharded_blocks: {blocks}}}\n"
    )
    with pytest.raises(InputError, match=message):
        planned(tmp_path, str(recipe), gpu="h100", loop=loop, length=None)


def test_the_recipe_that_a_plan_writes_has_them(tmp_path: Path, config: str) -> None:
    written = tmp_path / "written.yaml"
    options = {"gpu": "h100", "memory": 14.0, "gpus": 2, "lora": 8, "length": 256, "output": str(written)}
    _, found = planned(tmp_path, config, **options)
    chosen = found["candidates"][found["chosen"]]
    assert chosen["unsharded_blocks"]
    assert load_recipe(str(written)).strategy.unsharded_blocks == chosen["unsharded_blocks"]


def test_where_all_weights_fit_whole_none_is_tried(tmp_path: Path, config: str) -> None:
    _, found = planned(tmp_path, config, gpu="h100", gpus=2, lora=8, length=512)
    assert {c["unsharded_blocks"] for c in found["candidates"]} == {None}


def test_few_numbers_of_blocks_are_tried(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Halving, also where almost none fits: one by one was a second of a plan of 80 blocks."""
    tried: list[int] = []
    own = Search.candidate

    def candidate(self: Search, resolved: Resolved, *more: Any, **options: Any) -> Candidate:
        tried.extend([resolved.whole_blocks] if resolved.whole_blocks else [])
        return own(self, resolved, *more, **options)

    monkeypatch.setattr(Search, "candidate", candidate)
    _, found = planned(tmp_path, config, gpu="h100", memory=12.0, gpus=2, lora=8, length=512)
    assert any(c["fits"] for c in found["candidates"])
    assert tried
    assert len(tried) <= 6 * max(1, len({c["strategy"] for c in found["candidates"] if c["fits"]}))
