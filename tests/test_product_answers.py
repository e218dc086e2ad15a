"""The recording of answers: the same version answers the same, and a changed one is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from product_answers.__main__ import answer, compare, main


def test_a_question_is_answered_the_same_twice() -> None:
    asked = "batch.micro_size=0"
    assert answer("bad", asked) == answer("bad", asked)
    assert answer("bad", asked).startswith("exit 2: override batch.micro_size=0: batch.micro_size: ")


def test_what_changed_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, found in (("before", "one"), ("after", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "help.json").write_text(json.dumps({"train": [found, "same"], "plan": "same"}))
    assert compare(tmp_path / "before", tmp_path / "before") == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    shown = capsys.readouterr().out
    assert "help       1 of 2 differ\n--- help train\n" in shown
    assert '- "one",' in shown
    assert '+ "two",' in shown
    assert "same" not in shown
