"""A kept result as a gate: less proven than then is exit status 1."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cases import every_case
from tiny import LLAMA
from toolkit.errors import InputError
from toolkit.verification.baseline import badge, compare, read_baseline
from toolkit.verification.command import run_command
from toolkit.verification.commands import VerifyRequest

GOOD: dict[str, Any] = {
    "verdict": "equivalent",
    "recipe_sha256": "a",
    "passes": [
        {"pass": "logic", "tolerance": "bound", "stages": [{"stage": "gradient", "detection_limit": 4.8e-7}]},
        {"pass": "precision", "tolerance": "measured", "stages": [{"stage": "gradient", "detection_limit": 0.01},
                                                                  {"stage": "ledger", "detection_limit": None}]},
    ],
    "engagement": [{"pass": "logic", "id": "frozen", "claim": "frozen tensors", "ok": True}],
}  # fmt: skip


def _changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    change(document)
    return document


def _limit(at: int, value: float | None) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["passes"][at]["stages"][0].update(detection_limit=value)


@every_case(
    ("change", "weaker"),
    [
        (lambda document: None, []),
        (_limit(0, 1e-8), []),
        (_limit(0, 4.9e-7), ["logic pass, gradient: detects errors from 4.9e-07, was 4.8e-07"]),
        (_limit(1, 0.019), []),  # measured: another draw
        (_limit(1, 0.021), ["precision pass, gradient: detects errors from 2.1e-02, was 1.0e-02"]),
        (_limit(0, None), ["logic pass, gradient: no detection limit, was 4.8e-07"]),
        (lambda document: document["passes"].pop(), ["no precision pass"]),
        (lambda document: document["passes"][1]["stages"].pop(), ["precision pass, ledger: not compared"]),
        (lambda document: document["engagement"].clear(), ["logic pass: no evidence for: frozen tensors"]),
        (
            lambda document: document.update(verdict="not-exercised"),
            ["the verdict is not-exercised, and was equivalent"],
        ),
    ],
)
def test_what_is_weaker(change: Callable[[dict[str, Any]], Any], weaker: list[str]) -> None:
    found = compare(GOOD, _changed(change), "kept.json")
    assert list(found.weaker) == weaker
    assert found.ok == (not weaker)
    assert not found.changed


def test_another_recipe_is_said() -> None:
    found = compare(GOOD, _changed(lambda document: document.update(recipe_sha256="b")), "kept.json")
    assert found.lines()[-1] == "note: the recipe has changed since kept.json was written"


@every_case(
    ("text", "message"),
    [(None, "No such file"), ("{", "is not JSON"), ("[]", "is not a result of toolkit verify"), ("{}", "not a result")],
)
def test_a_file_that_is_no_result(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_baseline(str(file))
    assert f"write it with --json {file}" in str(caught.value)


def test_a_badge() -> None:
    assert badge(GOOD)["message"] == "equivalent, 1.0e-02"
    different = badge(_changed(lambda document: document.update(verdict="different")))
    assert (different["message"], different["color"], different["schemaVersion"]) == ("different", "red", 1)


@pytest.mark.parametrize("lost", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("launches")
def test_the_command(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {
        "model": {"config": LLAMA},
        "tokenizer": {"path": "none"},
        "data": {"train": "none"},
        "precision": "fp32",
        "strategy": {"name": "single"},
        "machine": {"device": "cpu"},
        "run": {"max_steps": 5},
    }
    Path("recipe.yaml").write_text(json.dumps(recipe))
    kept = partial(VerifyRequest, time_limit=120.0)
    assert run_command("recipe.yaml", kept(json_target="kept.json")) == 0
    request = kept(json_target="again.json", baseline="kept.json", badge="badges/r.json")
    again = partial(run_command, "recipe.yaml", request)
    if not lost:
        assert again() == 0
        assert json.loads(Path("again.json").read_text())["baseline"]["ok"]
        assert json.loads(Path("badges/r.json").read_text())["message"].startswith("equivalent, 4.8e-07")
        return
    document = json.loads(Path("kept.json").read_text())
    gradient = next(one for one in document["passes"][0]["stages"] if one["stage"] == "gradient")
    gradient["detection_limit"] = 1e-9
    Path("kept.json").write_text(json.dumps(document))
    assert again() == 1
    assert "weaker than kept.json: logic pass, gradient: detects errors from" in capsys.readouterr().out
