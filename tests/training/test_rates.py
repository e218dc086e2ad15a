"""Tokens per second: of the rows, padding aside, with those that have a loss beside them; one definition everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import loader_for, resolved_from
from tiny import recipe_dict
from toolkit.data.loader import open_data
from toolkit.launch.group import WorkerGroup
from toolkit.model.processor import load_tokenizer
from toolkit.recipe.resolve import Resolved
from toolkit.training import metrics
from toolkit.training.metrics import MetricsLog, Pending
from toolkit.training.run import run
from toolkit.watching.runs import Run, Step


def test_both_rates_are_of_the_same_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    log = MetricsLog(tmp_path / "metrics.jsonl", lambda tensor: 2 * tensor)  # two ranks with the same
    one = torch.tensor(1.0)
    for rows in (30.0, 50.0):
        log.add(Pending(1, one, torch.tensor(16.0), one, 0.1, False, None, None, torch.tensor(rows)))
    records = log.flush()
    assert [record.tokens for record in records] == [16, 16]
    assert {record.tokens_per_second for record in records} == {2 * 80 / 2.0}
    assert {record.supervised_tokens_per_second for record in records} == {32 / 2.0}
    log.add(Pending(2, one, torch.tensor(9.0), one, 0.1, False))
    [unknown] = log.flush()
    assert unknown.tokens_per_second == unknown.supervised_tokens_per_second == 3.0
    assert (log.tokens, log.row_tokens) == (41, 169)
    log.close()


@pytest.mark.parametrize("packing", [False, True])
def test_padding_is_not_counted(packing: bool, tiny_root: Path) -> None:
    recipe = recipe_dict(tiny_root, data={"packing": packing}, strategy={"name": "single"}, machine={"processes": 1})
    resolved = resolved_from(recipe)
    samples: Any = open_data(resolved.recipe, "train", load_tokenizer(resolved.recipe))
    loader = loader_for(resolved, 0)
    windows = iter(loader)
    assert loader.steps_per_epoch is not None
    epoch = [micro for _ in range(loader.steps_per_epoch) for micro in next(windows)]
    assert sum(micro.row_tokens for micro in epoch) == int(samples.lengths().sum())
    assert sum(micro.tensors["input_ids"].numel() for micro in epoch) > int(samples.lengths().sum()), (
        "nothing is padded"
    )


def counted_job(resolved: Resolved) -> dict[str, Any]:
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    try:
        return run(resolved, resume=False, screen=None)
    finally:
        torch.distributed.destroy_process_group = destroy


MESHES: list[tuple[str, dict[str, int]]] = [
    ("ddp", {}), ("fsdp2", {"tensor": 2}), ("ddp", {"context": 2}), ("ddp", {"pipeline": 2})
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "mesh"), MESHES)
def test_tokens_that_ranks_share_count_once(
    strategy: str, mesh: dict[str, int], tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    (tmp_path / "run").mkdir()
    how: dict[str, Any] = {"name": strategy} | ({"mesh": mesh} if mesh else {})
    recipe = recipe_dict(
        tiny_root, strategy=how, batch={"micro_size": None, "global_size": 8}, run={"output_dir": str(tmp_path / "run")}
    )
    resolved = resolved_from(recipe)
    answer = group.run(counted_job, resolved)[0]
    one = recipe | {"strategy": {"name": "single"}, "machine": {"device": "cpu", "processes": 1}}
    windows = iter(loader_for(resolved_from(one), 0))
    expected = [sum(micro.row_tokens for micro in next(windows)) for _ in range(4)]
    assert answer["row_tokens"] == sum(expected)
    for line, rows in zip((tmp_path / "run/metrics.jsonl").read_text().splitlines(), expected, strict=True):
        found = json.loads(line)
        ratio = found["tokens_per_second"] / found["supervised_tokens_per_second"]
        assert ratio == pytest.approx(rows / found["tokens"], rel=0.01)
    assert answer["tokens_per_second"] / answer["supervised_tokens_per_second"] == pytest.approx(
        answer["row_tokens"] / answer["tokens"], rel=0.01
    )


def test_the_time_that_is_left_follows_from_files_of_any_version() -> None:
    rates: dict[str, Any] = {"tokens": 100.0, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "skipped": False}
    now = Step(1, tokens_per_second=400.0, supervised_tokens_per_second=50.0, **rates)
    earlier = Step(1, tokens_per_second=50.0, supervised_tokens_per_second=None, **rates)
    for step in (now, earlier):
        assert Run(Path(), state="running", total=4, steps=[step]).seconds_left == 6.0
