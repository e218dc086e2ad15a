"""Requests of the pages Runs and Data, without a browser and without training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from studio_server import Server
from tiny import recipe_dict
from toolkit.errors import InputError
from toolkit.studio import jobs
from toolkit.studio.folders import Folders


@pytest.fixture
def served(make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Server, Path]:
    run = tmp_path / "runs" / "first"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "rank0.log").write_text("<b>hello</b>\n")
    (run / "recipe.json").write_text(json.dumps({"recipe": {"run": {"max_steps": 4}}, "recipe_version": 0}))
    lines = [{"step": n, "loss": 1 / n, "lr": 0.1, "grad_norm": 1, "tokens": 3, "tokens_per_second": 5} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return make_server([tmp_path]), run


def test_runs_their_curves_and_logs(served: tuple[Server, Path]) -> None:
    server, run = served
    assert server.ask("/api/runs", {}).json() == {"runs": [{"name": str(run), "shown": "runs/first"}]}
    (found,) = server.ask("/api/run", {"names": [str(run)]}).json()["runs"]
    assert found["steps"]["loss"] == [1.0, 0.5]
    assert (found["total"], found["logs"]) == (4, ["rank0.log"])
    assert server.ask("/api/log", {"name": str(run), "log": "rank0.log"}).json() == {"text": "<b>hello</b>\n"}
    for log in ("../recipe.json", "rank1.log", "/etc/passwd", ""):
        assert server.ask("/api/log", {"name": str(run), "log": log}).status == 422, log
    for name in ("/etc", "..", str(run.parents[2])):
        assert server.ask("/api/run", {"names": [name]}).status == 422, name


def test_a_run_is_started_beside_its_folder_and_only_inside(
    served: tuple[Server, Path], tiny_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, run = served
    started: list[list[str]] = []

    class Job:
        def __init__(self, command: list[str], **options: Any) -> None:
            assert options["start_new_session"]
            started.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Job)
    recipe = recipe_dict(tiny_root, run={"output_dir": "runs/second"})
    made = server.ask("/api/start", {"text": yaml.safe_dump(recipe)})
    assert made.json() == {"name": str(run.parent / "second")}
    saved = run.parent / ".studio" / "second-recipe.yaml"
    assert started == [[sys.executable, "-m", "toolkit", "train", str(saved)]]
    assert yaml.safe_load(saved.read_text()) == recipe
    for output in ("..", "/tmp/elsewhere", ".", "runs/../../x"):
        recipe["run"]["output_dir"] = output
        assert server.ask("/api/start", {"text": yaml.safe_dump(recipe)}).status == 422, output
    recipe["model"]["trust_remote_code"] = True
    recipe["run"]["output_dir"] = "runs/third"
    assert server.ask("/api/start", {"text": yaml.safe_dump(recipe)}).status == 422
    assert len(started) == 1


@pytest.mark.usefixtures("launches")
def test_only_a_process_of_the_toolkit_is_stopped(served: tuple[Server, Path]) -> None:
    server, run = served
    assert server.ask("/api/stop", {"name": str(run)}).status == 422
    code = (
        "import fcntl, os, sys, time\n"
        f"h = os.open({str(run / '.lock')!r}, os.O_RDWR | os.O_CREAT); fcntl.lockf(h, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(100)"
    )
    elsewhere = run / "toolkit"
    elsewhere.mkdir()
    words = (("other", False), (str(elsewhere / "other.py"), False), (str(elsewhere), False))
    for name, ended in (*words, ("toolkit.train", True), ("/usr/bin/toolkit", True), ("toolkit", True)):
        with subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE) as job:
            assert job.stdout is not None
            job.stdout.readline()
            assert (server.ask("/api/stop", {"name": str(run)}).status == 200) is ended, name
            assert server.ask("/api/resume", {"name": str(run)}).status == 422, "it is running"
            job.kill()


def test_a_run_whose_recipe_names_another_folder_is_not_resumed(served: tuple[Server, Path], tiny_root: Path) -> None:
    server, run = served
    assert server.ask("/api/resume", {"name": str(run)}).status == 422
    recipe = recipe_dict(tiny_root, run={"output_dir": "/tmp/elsewhere"})
    (run / "recipe.json").write_text(json.dumps({"recipe": recipe, "recipe_version": 0}))
    with pytest.raises(InputError, match=r"not in a folder|names another folder"):
        jobs.resume(Folders.of([run.parents[1]]), str(run))


@pytest.mark.usefixtures("launches")
def test_the_data_of_a_recipe(make_server: Callable[..., Server], tiny_root: Path, tmp_path: Path) -> None:
    server = make_server([tiny_root])
    text = yaml.safe_dump(recipe_dict(tiny_root))
    answer = server.ask("/api/data", {"text": text, "only": "", "evaluation": False})
    assert answer.status == 200, answer.body
    shown = server.ask("/report", query=f"kept={answer.json()['page']}".encode())
    assert b"<h2>Lengths</h2>" in shown.body
    assert "sandbox" in shown.headers["content-security-policy"]
    (tmp_path / "outside.jsonl").write_text('{"text": "the-secret"}\n')
    outside = recipe_dict(tiny_root, data={"train": str(tmp_path / "outside.jsonl")})
    refused = server.ask("/api/data", {"text": yaml.safe_dump(outside), "only": "", "evaluation": False})
    assert refused.status == 422
    assert b"the-secret" not in refused.body
    assert not list(tmp_path.glob("**/*.cache")), os.listdir(tmp_path)
