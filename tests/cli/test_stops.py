"""A run that is asked to stop finishes its step on every rank, saves, says how to go on, and does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from signalled import TOOLKIT, begin, metrics, rank_pid, steps, until_step, write_recipe
from tiny import LLAMA

pytestmark = pytest.mark.usefixtures("launches")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "files/accelerate.yaml"]
SIZES = {"single": {"processes": 1}, "zero2": {"processes": 2}, "fsdp2": {"processes": 2}}
LONG = {"run": {"output_dir": "run", "save_every": 1000, "max_steps": 40},
        "model": {"config": LLAMA | {"hidden_size": 256, "intermediate_size": 512}}}  # fmt: skip
"""Long enough that it is still going when the signal comes; not saved before."""


def prepare(folder: Path, root: Path, strategy: str) -> None:
    write_recipe(folder, root, strategy={"name": strategy}, machine=SIZES[strategy], **LONG)


def saved_step(run: Path) -> int:
    [folder] = (run / "checkpoints").iterdir()
    return int(folder.name.removeprefix("step-"))


def train(here: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*TOOLKIT, "train", "r.yaml", *arguments], cwd=here, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("zero2", signal.SIGTERM),
        pytest.param("fsdp2", signal.SIGINT, marks=nightly),
        pytest.param("single", signal.SIGUSR1, marks=nightly),
    ],
)
def test_asked_to_stop_it_saves_and_goes_on(
    strategy: str, number: signal.Signals, tmp_path: Path, tiny_root: Path
) -> None:
    prepare(tmp_path, tiny_root, strategy)
    job = begin([*TOOLKIT, "train", "r.yaml"], tmp_path)
    until_step(tmp_path / "run", 3, job)
    job.send_signal(number)
    _, output = job.communicate(timeout=60)
    assert job.returncode == 128 + number, output
    stopped_at = saved_step(tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == stopped_at, "the step was finished, and no other begun"
    assert f"after step {stopped_at}, saved in run/checkpoints/step-{stopped_at:08d}" in output
    assert output.count("\n") == 2
    assert output.endswith("resume with: toolkit train r.yaml --resume\n")
    assert (tmp_path / "run/stopped.json").exists()
    assert f"resumed from run/checkpoints/step-{stopped_at:08d}" in train(tmp_path, "--resume")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 41))
    if strategy != "zero2":  # that one is the quick one; what it would show is shown of its checkpoints
        train(tmp_path, "run.output_dir=whole")
        assert steps(tmp_path / "run") == steps(tmp_path / "whole")
    assert not (tmp_path / "run/stopped.json").exists()


@pytest.mark.parametrize(("strategy", "number"), [(name, signal.SIGTERM) for name in ("fsdp2", "single")])
@pytest.mark.nightly
def test_accelerate_launch_stops_as_well(
    strategy: str, number: signal.Signals, tmp_path: Path, tiny_root: Path
) -> None:
    prepare(tmp_path, tiny_root, strategy)
    subprocess.run([*TOOLKIT, "config", "r.yaml", "-o", "files"], cwd=tmp_path, check=True, capture_output=True)
    job = begin([*LAUNCH, "-m", "toolkit.train", "r.yaml"], tmp_path)
    until_step(tmp_path / "run", 3, job)
    job.send_signal(number)  # the launcher alone
    _, output = job.communicate(timeout=60)
    assert job.returncode != 0
    deadline = time.monotonic() + 30
    while not (tmp_path / "run/stopped.json").exists():  # accelerate leaves a lone process behind when it ends
        assert time.monotonic() < deadline
        time.sleep(0.1)
    stopped_at = saved_step(tmp_path / "run")
    assert f"stopped by SIGTERM after step {stopped_at}, saved in" in output


@pytest.mark.nightly
def test_one_rank_is_asked_and_all_stop(tmp_path: Path, tiny_root: Path) -> None:
    prepare(tmp_path, tiny_root, "zero2")
    job = begin([*TOOLKIT, "train", "r.yaml"], tmp_path)
    until_step(tmp_path / "run", 2, job)
    os.kill(rank_pid(job.pid, 1), signal.SIGUSR1)
    _, output = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGUSR1
    assert f"stopped by SIGUSR1 after step {saved_step(tmp_path / 'run')}" in output


@pytest.mark.nightly
def test_a_second_signal_stops_at_once_and_harms_nothing(tmp_path: Path, tiny_root: Path) -> None:
    write_recipe(
        tmp_path, tiny_root, strategy={"name": "zero2"}, run={"output_dir": "run", "save_every": 2, "max_steps": 10**6}
    )
    job = begin([*TOOLKIT, "train", "r.yaml"], tmp_path)
    until_step(tmp_path / "run", 5, job)
    os.kill(rank_pid(job.pid, 1), signal.SIGSTOP)  # the step cannot be finished
    job.send_signal(signal.SIGINT)
    time.sleep(2)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    _, output = job.communicate(timeout=60)  # the step, which a stopped rank holds up, never ends
    assert (job.returncode, output) == (130, "stopped by Ctrl-C at once; resume with --resume\n")
    done = subprocess.run(
        [*TOOLKIT, "train", "r.yaml", "run.max_steps=12", "--resume"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 2), done.stderr


@pytest.mark.nightly
def test_a_killed_launcher_leaves_no_rank_behind(tmp_path: Path, tiny_root: Path) -> None:
    import psutil

    prepare(tmp_path, tiny_root, "fsdp2")
    job = begin([*TOOLKIT, "train", "r.yaml"], tmp_path)
    until_step(tmp_path / "run", 2, job)
    ranks = [psutil.Process(rank_pid(job.pid, rank)) for rank in (0, 1)]
    job.kill()
    assert not psutil.wait_procs(ranks, timeout=40)[1]
    saved_step(tmp_path / "run")
