"""A step without a supervised token has no loss: none is shown, judged, saved or tracked in its place."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import resolved_from
from tiny import recipe_dict
from toolkit.recipe.schema import Run
from toolkit.training import run as running
from toolkit.training import steps
from toolkit.training.guard import LossGuard
from toolkit.training.metrics import MetricsLog, Pending, StepRecord
from toolkit.training.screen import Screen
from toolkit.watching.runs import read_run


def record(tokens: int, loss: float | None = None, norm: float | None = 0.0, **more: Any) -> StepRecord:
    return StepRecord(3, loss, norm, 1e-3, tokens, 10.0, 8.0, more.pop("skipped", False), **more)


def test_the_log_the_screen_and_watch_have_no_loss(tmp_path: Path) -> None:
    def pending(step: int, total: float, tokens: int) -> Pending:
        return Pending(step, torch.tensor(total), torch.tensor(float(tokens)), torch.tensor(0.5), 1e-3, False)

    log = MetricsLog(tmp_path / "metrics.jsonl", lambda tensor: tensor)
    for one in (pending(1, 6.0, 4), pending(2, 0.0, 0), pending(3, float("nan"), 0), pending(4, float("inf"), 2)):
        log.add(one)
    records = log.flush()
    assert [one.loss for one in records] == [1.5, None, None, None]
    assert log.without_loss == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["tokens"]) for line in lines] == [(1.5, 4), (None, 0), (None, 0), (None, 2)]
    out = io.StringIO()
    view = Screen(out, 4)
    for one in records:
        view.step(one, 0)
    shown = out.getvalue().splitlines()
    assert [line.split("norm")[0].split("loss ")[1].strip() for line in shown] == [
        "1.5000", "– (no supervised token)", "– (no supervised token)", "not finite",
    ]  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {}}))
    assert read_run(tmp_path).notes == [
        "the loss was not finite in 1 steps",
        "2 steps had no supervised token: no loss, and nothing was learned in them",
    ]


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_no_loss_is_not_a_bad_loss(policy: Any) -> None:
    """Neither is it one of 0, which a spike would be measured against."""
    judged = steps.Steps.__new__(steps.Steps)
    judged.guard = LossGuard(Run(on_bad_loss=policy, loss_spike=2.0), [])

    class Scaling:
        class resolved:
            class precision:
                loss_scaling = False

    judged.session = Scaling()  # type: ignore[assignment]
    assert judged._wrong(record(0)) is None
    assert not judged.guard.recent
    assert judged.guard.in_a_row == 0
    if policy != "skip":
        assert judged._wrong(record(4)) == "the loss is not finite"
        assert judged._wrong(record(0, norm=None)) == "the gradient is not finite"


def rows(folder: Path) -> str:
    """Four prompts, of which two are cut before their answers."""
    contents = ["the model", "the model", "the model " * 60, "the model " * 60]
    file = folder / "half.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text, "completion": " a rank"}) + "\n" for text in contents), encoding="utf-8"
    )
    return str(file)


def test_a_run_says_so_and_goes_on(tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, batch={"micro_size": 1, "accumulation": 1},
        data={"train": rows(tmp_path), "format": "prompt-completion", "workers": 0},
        run={"max_steps": 4, "output_dir": str(tmp_path / "run"), "trackers": ["tensorboard"], "on_bad_loss": "skip",
             "loss_spike": 3.0},
    )  # fmt: skip
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "init_trackers", lambda *arguments, **options: None)
    monkeypatch.setattr(Accelerator, "log", lambda self, values, step: logged.append(values | {"step": step}))
    (tmp_path / "run").mkdir()
    out = io.StringIO()
    answer = running.run(resolved_from(recipe), resume=False, screen=out)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    empty = [line["step"] for line in lines if line["tokens"] == 0]
    assert len(empty) == 2
    assert [line["step"] for line in lines if line["loss"] is None] == empty
    assert [one["step"] for one in logged if "loss" not in one] == empty
    assert all(one["supervised_tokens"] == 0 for one in logged if "loss" not in one)
    assert (answer["final_loss"] is None) == (lines[-1]["loss"] is None)
    said = out.getvalue()
    assert said.count("so no loss and no gradient: momentum and weight decay alone move the weights") == 1
    assert "note: 2 of 4 steps had no supervised tokens: nothing was learned in them" in said
    assert "2 of 4 steps had no supervised tokens: nothing was learned in them" in answer["notes"]
    assert "loss 0.0000" not in said


def test_an_evaluation_without_one_is_no_loss_of_0(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the best checkpoint and the last improvement."""
    recipe = recipe_dict(
        tiny_root, strategy={"name": "single"}, machine={"processes": 1}, data={"eval": str(tiny_root / "train.jsonl")},
        run={"max_steps": 2, "output_dir": str(tmp_path / "run"), "eval_every": 1, "save_every": 1,
             "early_stopping": {"patience": 5}},
    )  # fmt: skip
    monkeypatch.setattr(steps, "eval_batches", lambda *arguments, **options: [])
    (tmp_path / "run").mkdir()
    out = io.StringIO()
    answer = running.run(resolved_from(recipe), resume=False, screen=out)
    assert answer["eval_loss"] is None
    assert answer["best_checkpoint"] is None
    assert "step 1: no held-out loss: no supervised tokens in data.eval" in out.getvalue()
    lines = [json.loads(line) for line in (tmp_path / "run/eval.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [None, None]
