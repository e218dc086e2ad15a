"""A run ends when its held-out loss no longer improves; a resumed run decides as the uninterrupted one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import EarlyStopping
from toolkit.training.early_stopping import Improvement
from toolkit.training.finding import newest, tensors_of
from toolkit.training.manifest import read_manifest
from toolkit.training.run import run
from toolkit.training.scores import Score


def test_only_lower_losses_are_improvements() -> None:
    settings, seen = EarlyStopping(patience=2, min_delta=0.1), Improvement()
    ended = []
    for step, loss in enumerate([None, 3.0, 2.95, 2.85, 2.80, None, 1.0], start=1):
        seen.judge(Score("eval_loss", loss), step, settings)
        ended.append(seen.ends(settings))
    assert ended == [False, False, False, False, False, True, False]
    assert seen == Improvement(1.0, 7, 0)
    assert not Improvement(1.0, 1, 9).ends(None)


def test_of_other_metrics_more_is_better() -> None:
    settings, seen = EarlyStopping(patience=2, min_delta=0.01), Improvement(0.3, 1, 1)
    ended = []
    for step, value in enumerate([0.5, 0.505, 0.6, 0.605, 0.4], start=2):
        seen.judge(Score("news.f1", value), step, settings)
        ended.append(seen.ends(settings))
    assert ended == [False, False, False, False, True], "the losses of before are no measure of it"
    assert seen == Improvement(0.6, 4, 2, "news.f1")
    assert seen.reason() == "run.early_stopping: 2 evaluations without a better news.f1 (best 0.6000 at step 4)"


def no_improvement(root: Path, folder: Path, patience: int = 2, **sections: Any) -> dict[str, Any]:
    """Losses fall by less than ``min_delta`` after the first evaluation."""
    stopping = {"patience": patience, "min_delta": 5.0}
    return recipe_dict(
        root,
        data={"eval": str(root / "eval.jsonl")},
        schedule={"name": "constant", "warmup_steps": 0},
        run={"max_steps": 9, "eval_every": 1, "save_every": 1, "keep": 9, "output_dir": str(folder),
             "early_stopping": stopping},
        **sections,
    )  # fmt: skip


def whole(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    last = newest(folder / "checkpoints")
    assert last is not None
    return read_manifest(last), dict(tensors_of(last))


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tiny_root: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    alone: Any = {"strategy": {"name": "single"}, "machine": {"processes": 1}}
    resolved = resolved_from(no_improvement(tiny_root, tmp_path / "run", **alone))
    answer = run(resolved, resume=False, screen=None)
    assert answer["steps"] == 3, "the best of step 1, and two that are no better"
    assert answer["ended_early"] is True
    manifest, weights = whole(tmp_path / "run")
    improvement = {"best": manifest["improvement"]["best"], "best_step": 1, "since": 2, "metric": "eval_loss"}
    assert manifest["improvement"] == improvement

    shutil.rmtree(tmp_path / "run/checkpoints/step-00000003")
    again = run(resolved, resume=True, screen=None)
    assert again["steps"] == 3
    resumed, resumed_weights = whole(tmp_path / "run")
    assert resumed["improvement"] == manifest["improvement"]
    assert all(torch.equal(weight, resumed_weights[name]) for name, weight in weights.items())

    assert run(resolved, resume=True, screen=None)["steps"] == 3, "a run that has ended takes no step"
    longer = run(resolved_from(no_improvement(tiny_root, tmp_path / "run", 4, **alone)), resume=True, screen=None)
    assert longer["steps"] == 5


def stopping_run(resolved: Resolved) -> tuple[int, bool]:
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    try:
        answer = run(resolved, resume=False, screen=None)
    finally:
        torch.distributed.destroy_process_group = destroy
    return answer["steps"], answer["ended_early"]


def test_all_ranks_end_together(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    (tmp_path / "run").mkdir()
    resolved = resolved_from(no_improvement(tiny_root, tmp_path / "run", strategy={"name": "zero2"}))
    assert group.run(stopping_run, resolved) == [(3, True), (3, True)]


def test_it_needs_evaluations(tiny_root: Path, tmp_path: Path) -> None:
    recipe = no_improvement(tiny_root, tmp_path)
    with pytest.raises(
        InputError, match=r"run\.early_stopping: needs evaluations, but no data is held out; set data\.eval or"
    ):
        resolved_from(recipe | {"data": recipe["data"] | {"eval": None}, "run": recipe["run"] | {"eval_every": None}})
    with pytest.raises(InputError, match=r"run\.early_stopping: needs evaluations, but run\.eval_every is 0"):
        resolved_from(recipe | {"run": recipe["run"] | {"eval_every": 0}})
