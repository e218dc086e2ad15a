"""`toolkit init`: what it asks, what it writes for each answer, and what it says is not there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import typer

from cases import every_case
from toolkit.errors import InputError
from toolkit.recipe import starter
from toolkit.recipe.load import load_recipe

KEYS = ("model", "data", "format", "eval", "lora", "processes", "strategy", "precision", "steps")
NOTHING: dict[str, Any] = dict.fromkeys(KEYS)


@every_case(
    ("answer", "expected"),
    [
        ("0.05", (None, 0.05)),
        ("held-out.jsonl", ("held-out.jsonl", None)),
        ("none", (None, None)),
        (None, (None, None)),
    ],
)
def test_evaluation_is_a_share_a_file_or_none(
    answer: str | None, expected: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    starter.init_command("recipe.yaml", NOTHING | {"eval": answer}, force=False)
    recipe = load_recipe("recipe.yaml")
    assert (recipe.data.eval, recipe.data.eval_fraction) == expected
    assert recipe.eval_interval == (0 if expected == (None, None) else 100)
    assert recipe.run.save_every == 100, "--best takes a checkpoint that was evaluated"


def test_a_terminal_is_asked_everything_and_defaults_follow_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    asked: dict[str, Any] = {}

    def prompt(question: str, default: Any) -> Any:
        asked[question] = default
        return {"LoRA rank (0: train every weight)": 0, "processes on this machine, one per GPU": 4}.get(
            question, default
        )

    monkeypatch.setattr(typer, "prompt", prompt)
    starter.init_command("recipe.yaml", NOTHING | {"model": "/nowhere/model", "data": "gone.jsonl"}, force=False)
    assert len(asked) == len(KEYS) - 2, "what flags say is not asked"
    recipe = load_recipe("recipe.yaml")
    assert (recipe.strategy.name, recipe.machine.processes, recipe.adapter) == ("fsdp2", 4, None)
    assert next(default for question, default in asked.items() if question.startswith("strategy")) == "fsdp2"
    assert recipe.data.eval_fraction == 0.05
    said = capsys.readouterr().out
    assert "note: model.path: no folder /nowhere/model" in said
    assert 'note: data.train: gone.jsonl: no such file yet; a row a line, for example {"text": "What' in said
    assert "next: toolkit data recipe.yaml, then toolkit plan recipe.yaml --gpu NAME" in said


def test_what_is_there_is_not_noted(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    answers = NOTHING | {
        "model": "./model",
        "data": str(tiny_root / "train.jsonl"),
        "eval": str(tiny_root / "eval.jsonl"),
    }
    starter.init_command("recipe.yaml", answers, force=False)
    assert "note" not in capsys.readouterr().out
    with pytest.raises(InputError, match=r"strategy\.name"):
        starter.init_command("other.yaml", NOTHING | {"strategy": "zer3"}, force=False)
    assert not (tmp_path / "other.yaml").exists()
