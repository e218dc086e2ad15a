"""A recipe that cannot be trained is refused where it was started; a start that fails is shown as failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("starlette", reason="the extra studio is not installed")
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.studio import jobs
from toolkit.studio.folders import Folders
from toolkit.studio.starts import STARTS
from toolkit.training.metrics import set_aside


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    class Job:
        def __init__(self, command: list[str], **options: Any) -> None:
            calls.append(command)

        def poll(self) -> int:
            return 2

    monkeypatch.setattr("toolkit.studio.jobs.subprocess.Popen", Job)
    monkeypatch.setattr(jobs, "_started", [])
    monkeypatch.setattr(jobs, "_failed", set())
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.parametrize("title", [title for title, (_, text) in STARTS.items() if "config:" in text])
def test_a_preset_is_a_plan_and_says_so_when_it_is_started(
    title: str, launched: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        jobs.start(Folders.of([tmp_path]), STARTS[title][1])
    assert not launched
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_missing_data_is_said_before_the_start(launched: list[list[str]], tmp_path: Path, tiny_root: Path) -> None:
    recipe = recipe_dict(tiny_root, run={"output_dir": "runs/first"})
    recipe["data"]["train"] = "absent.jsonl"
    with pytest.raises(InputError, match=r"absent\.jsonl"):
        jobs.start(Folders.of([tmp_path]), yaml.safe_dump(recipe))
    assert not launched


def test_a_start_that_fails_is_in_the_list(launched: list[list[str]], tmp_path: Path, tiny_root: Path) -> None:
    folder = jobs.start(Folders.of([tmp_path]), yaml.safe_dump(recipe_dict(tiny_root, run={"output_dir": "runs/a"})))
    assert not jobs.failed(folder)
    jobs.reap()
    assert jobs.failed(folder)
    assert jobs.failures() == [folder]


def test_the_curve_of_a_run_that_starts_again_is_kept(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert set_aside(metrics) is None
    for number in (1, 2):
        metrics.write_text(f'{{"step": {number}}}\n')
        assert set_aside(metrics) == tmp_path / f"metrics.before-{number}.jsonl"
        assert not metrics.exists()
    assert (tmp_path / "metrics.before-1.jsonl").read_text() == '{"step": 1}\n'
