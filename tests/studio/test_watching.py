"""Runs read from their folders: whatever is in them, and without being in their way."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from cases import every_case
from toolkit.errors import InputError
from toolkit.studio.folders import Folders
from toolkit.studio.routes import page_fields
from toolkit.watching.runs import find_runs, holder, read_run, read_steps
from toolkit.watching.screen import lasting, picture, spark, watch


def step(number: int, loss: float | None = 1.0, **more: object) -> str:
    values = {"step": number, "loss": loss, "lr": 0.1, "grad_norm": 0.5, "tokens": 100, "tokens_per_second": 50.0,
              "skipped": False}  # fmt: skip
    return json.dumps(values | more) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first"
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    (folder / "checkpoints" / ".step-00000003.writing").mkdir()
    (folder / "logs" / "rank0.log").write_text("hello\n")
    (folder / "logs" / "other.txt").write_text("no log")
    recipe = {"strategy": {"name": "zero2"}, "run": {"max_steps": 10}}
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe}))
    (folder / "metrics.jsonl").write_text(step(1, 3.0) + step(2, 2.0) + step(3, None, skipped=True))
    (folder / "eval.jsonl").write_text('{"step": 2, "loss": 2.5, "tokens": 3}\n')
    os.utime(folder / "metrics.jsonl", (1, 1))
    return folder


def test_what_a_folder_shows(run: Path) -> None:
    found = read_run(run)
    assert (found.state, found.strategy, found.total) == ("ended early", "zero2", 10)
    assert [one.loss for one in found.steps] == [3.0, 2.0, None]
    assert found.checkpoints == [2]
    assert found.logs == ["rank0.log"]
    assert found.evaluations == [(2, 2.5)]
    assert len(found.notes) == 2
    (run / "result.json").write_text('{"steps": 3}')
    assert read_run(run).state == "finished"
    (run / "stopped.json").write_text('{"signal": 15, "step": 3}')
    assert read_run(run).state == "stopped"


def test_a_line_that_is_being_written_and_a_repeated_step(run: Path) -> None:
    (run / "metrics.jsonl").write_text(step(1) + step(2) + step(2, 7.0) + '{"step": 3, "lo')
    assert [(one.step, one.loss) for one in read_steps(run / "metrics.jsonl")] == [(1, 1.0), (2, 7.0)]


def test_the_latest_answers_are_shown_in_both_screens(run: Path) -> None:
    talk = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a shard?"}]
    asked = [(at, prompt) for at in (2, 4) for prompt in ("hi", talk)]
    lines = [{"step": at, "prompt": prompt, "answer": f"\x1b[2J answer {at}"} for at, prompt in asked]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_run(run)
    told = [("hi", "\x1b[2J answer 4"), ("a shard?", "\x1b[2J answer 4")]
    assert (found.sampled, found.samples) == (4, told)
    page = page_fields(found, Folders((run.parent,)))
    assert (page["sampled"], page["samples"]) == (4, told)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture([found], 120))
    shown = console.export_text()
    assert "first: step 4: hi → �[2J answer 4" in shown
    assert "first: step 4: a shard? → �[2J answer 4" in shown
    assert "answer 2" not in shown


@every_case(
    "text",
    ["", "null", "[]", "{", "\0" * 50, '{"step": true}', '{"step": -1}', '{"step": 1e400, "loss": 1e400}', "[" * 50_000,
     '{"step": 1, "loss": "<b>", "lr": [], "skipped": "yes"}', '{"step": ' + "9" * 5000 + "}",
     '{"step": 1, "prompt": [3], "answer": "a"}', '{"step": 1, "prompt": "a", "answer": {}}', "\xff\xfe"],
)  # fmt: skip
def test_hostile_files_are_left_out(run: Path, text: str) -> None:
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "recipe.json", "result.json", "stopped.json"):
        (run / name).write_text(text)
    found = read_run(run)
    assert len(found.steps) <= 1
    picture([found], 80)


def test_a_pipe_or_a_link_in_the_place_of_a_file_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(step(9))
    for name, make in (("metrics.jsonl", os.mkfifo), ("eval.jsonl", lambda p: os.symlink(tmp_path / "secret", p))):
        (run / name).unlink()
        make(run / name)
    found = read_run(run)
    assert found.steps == []
    assert found.evaluations == []


@pytest.mark.usefixtures("launches")
def test_the_process_that_holds_a_folder_is_found_and_not_disturbed(run: Path) -> None:
    code = (
        "import fcntl, os, sys, time\n"
        f"h = os.open({str(run / '.lock')!r}, os.O_RDWR | os.O_CREAT); fcntl.lockf(h, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        assert holder(run) == job.pid
        assert read_run(run).state == "starting", "its metrics are older than the process"
        assert read_run(run).seconds_left is None
        with (run / "metrics.jsonl").open("a"):
            os.utime(run / "metrics.jsonl")
        assert read_run(run).state == "running"
        with (run / ".lock").open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        job.kill()
    assert holder(run) is None


def test_runs_are_found_the_latest_first_and_not_through_links(run: Path, tmp_path: Path) -> None:
    later = tmp_path / "runs" / "later"
    later.mkdir()
    (later / "recipe.json").write_text("{}")
    (tmp_path / "runs" / "linked").symlink_to(run)
    assert find_runs(tmp_path) == [later, run]
    assert find_runs(tmp_path, depth=0) == []


def test_the_terminal(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text("".join(step(n, 3.0 / n) for n in range(1, 6)))
    console = Console(width=120, record=True, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    assert watch([str(tmp_path)], once=True, console=console) == 0
    output = console.export_text()
    assert "5/10" in output
    assert "0.6000" in output
    assert "checkpoints at steps 2" in output
    with pytest.raises(InputError, match="no run in this folder"):
        watch([str(tmp_path / "runs" / "first" / "logs")], once=True)
    with pytest.raises(InputError, match="no such folder"):
        watch([str(tmp_path / "none")], once=True)


def test_a_name_cannot_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("\x1b[2J[red]x")
    folder.mkdir()
    (folder / "recipe.json").write_text("{}")
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture([read_run(folder)], 120))
    output = console.export_text()
    assert "\x1b" not in output
    assert "[red]" in output


def test_sparks_and_times() -> None:
    assert spark([1.0, None, 0.0], 10) == "█▁"
    assert spark([1.0], 10) == ""
    assert len(spark([float(n) for n in range(100)], 30)) == 30
    assert (lasting(59.2), lasting(3661)) == ("1:00", "1:01:01")


def test_the_time_left_follows_the_last_steps(run: Path) -> None:
    now = time.time()
    os.utime(run / "metrics.jsonl", (now, now))
    (run / "metrics.jsonl").write_text("".join(step(n) for n in range(1, 5)))
    assert read_run(run).seconds_left == pytest.approx(6 * 100 / 50)
