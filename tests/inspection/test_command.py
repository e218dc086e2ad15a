"""The command: exit statuses, one message, a page and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases import every_case
from tiny import make_text, recipe_dict
from toolkit.__main__ import main
from toolkit.errors import InputError
from toolkit.inspection.command import Request, data_command


@pytest.fixture
def recipe(tiny_root: Path, tmp_path: Path) -> Path:
    file = tmp_path / "r.yaml"
    file.write_text(yaml.safe_dump(recipe_dict(tiny_root, data={"eval": str(tiny_root / "eval.jsonl")})))
    return file


def test_the_result(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, target = tmp_path / "new" / "data.html", tmp_path / "data.json"
    status = data_command(
        Request(str(recipe), ("data.max_length=24",), samples=2, page=str(page), json_target=str(target))
    )
    assert status == 0
    found = json.loads(target.read_text())
    assert {"schema", "command", "recipe_sha256", "versions", "device", "started", "seconds"} <= found.keys()
    assert (found["schema"], found["data"], found["samples"]) == ("toolkit.data/1", "data.train", 30)
    assert {"tokens", "supervised", "cut", "padding_share", "refused", "shown"} <= found.keys()
    assert [one["row"].rpartition(":")[2] for one in found["shown"]] == ["1", "2"]
    assert page.read_text().startswith("<!doctype html>")
    assert "next: toolkit train" in capsys.readouterr().out


def test_the_held_out_data(recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "data.json"
    assert data_command(Request(str(recipe), evaluation=True, json_target=str(target))) == 0
    found = json.loads(target.read_text())
    assert (found["data"], found["samples"], found["steps_per_epoch"]) == ("data.eval", 9, 3)
    assert len(found["arrangements"]) == 1


def test_json_to_standard_output_is_all_there_is(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_command(Request(str(recipe), json_target="-")) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "data"


def test_refused_rows_are_exit_status_2_after_the_screen(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = make_text(tmp_path / "train.jsonl", 4)
    train.write_text(train.read_text() + '{"text": 3}\n{"txt": "a"}\n')
    assert data_command(Request(str(recipe), (f"data.train={train}",))) == 2
    shown = capsys.readouterr()
    assert "4 rows, 4 samples per epoch" in shown.out
    assert "2 problems that a run would refuse" in shown.out
    assert "next: toolkit train" not in shown.out
    assert [line.split(": ")[:2] for line in shown.err.splitlines()] == [
        [f"{train}:5", "text"], [f"{train}:6", "text"],
    ]  # fmt: skip


@every_case(
    ("overrides", "options", "message"),
    [
        (("data.train=nowhere.jsonl",), {}, "nowhere.jsonl"),
        (("data.eval=null",), {"evaluation": True}, "data.eval: is not set"),
        ((), {"only": "long"}, "--only long"),
        ((), {"rows": 0}, "--rows 0"),
        (("tokenizer.path=null",), {}, "tokenizer.path"),
        (("data.format=messages",), {}, "chat template"),
        (("data.fields={label: x}",), {}, "data.fields.label"),
        (("data.packing=true", "data.group_by_length=true"), {}, "data.group_by_length"),
    ],
)
def test_input_that_cannot_be_used(recipe: Path, overrides: tuple, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        data_command(Request(str(recipe), overrides, **options))


def test_a_page_that_cannot_be_written(recipe: Path) -> None:
    with pytest.raises(InputError, match="/proc/nowhere"):
        data_command(Request(str(recipe), page="/proc/nowhere/data.html"))


def test_the_recipe_of_a_gpu_is_read_without_one(recipe: Path) -> None:
    overrides = ("machine.device=cuda", "machine.processes=8", "strategy.name=fsdp2", "precision=bf16")
    assert data_command(Request(str(recipe), overrides)) == 0


def test_the_command_line(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["toolkit", "data", str(recipe), "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr() == ("", "--only nothing: must be one of cut, unsupervised, duplicate\n")
