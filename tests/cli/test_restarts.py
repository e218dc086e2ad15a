"""`--max-restarts`: a job whose rank dies goes on by itself, from its newest checkpoint, to the same end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from signalled import TOOLKIT, begin, metrics, rank_pid, steps, until_step, write_recipe
from tiny import LLAMA

pytestmark = pytest.mark.usefixtures("launches")


def prepare(folder: Path, root: Path, strategy: str) -> None:
    write_recipe(
        folder,
        root,
        strategy={"name": strategy},
        machine={"processes": 1 if strategy == "single" else 2},
        model={"config": LLAMA | {"hidden_size": 256, "intermediate_size": 512}},
        run={"output_dir": "run", "save_every": 5, "max_steps": 30},
    )


@pytest.mark.parametrize(
    "strategy",
    ["single", pytest.param("zero2", marks=pytest.mark.nightly), pytest.param("fsdp2", marks=pytest.mark.nightly)],
)
def test_it_goes_on_by_itself(strategy: str, tmp_path: Path, tiny_root: Path) -> None:
    prepare(tmp_path, tiny_root, strategy)
    job = begin([*TOOLKIT, "train", "r.yaml", "--max-restarts", "1"], tmp_path)
    until_step(tmp_path / "run", 7, job)
    os.kill(rank_pid(job.pid, 0 if strategy == "single" else 1), signal.SIGKILL)
    shown, output = job.communicate(timeout=150)
    assert job.returncode == 0, output
    assert "restarted automatically, attempt 2" in shown
    assert "resumed from run/checkpoints/step-" in shown
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 31))
    if strategy == "zero2":
        command = [*TOOLKIT, "train", "r.yaml", "run.output_dir=whole"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
        assert steps(tmp_path / "run") == steps(tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_an_extended_run_goes_on_by_itself(strategy: str, tmp_path: Path, tiny_root: Path) -> None:
    """Killed before it has saved anything of the longer run: it starts again from the shorter one's checkpoint."""
    prepare(tmp_path, tiny_root, strategy)
    short = [*TOOLKIT, "train", "r.yaml", "run.max_steps=5"]
    subprocess.run(short, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    longer = [*TOOLKIT, "train", "r.yaml", "run.save_every=25", "--resume"]
    done = subprocess.run(longer, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Add --extend" in done.stderr) == (2, True)
    job = begin([*longer, "--extend", "--max-restarts", "1"], tmp_path)
    until_step(tmp_path / "run", 10, job)
    os.kill(rank_pid(job.pid, 0 if strategy == "single" else 1), signal.SIGKILL)
    shown, output = job.communicate(timeout=150)
    assert job.returncode == 0, output
    assert shown.count("resumed from run/checkpoints/step-00000005") == 2
    assert shown.count("extended from 5 to 30 steps; learning rates: step 6: ") == 2
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 31))


@pytest.mark.nightly
def test_it_gives_up_and_says_why(tmp_path: Path, tiny_root: Path) -> None:
    """What the recipe gets wrong is not tried again; every start that failed is counted."""
    prepare(tmp_path, tiny_root, "fsdp2")
    bad = ["optimizer.lr=1e30", "optimizer.max_grad_norm=null", "schedule.warmup_steps=0"]
    done = subprocess.run(
        [*TOOLKIT, "train", "r.yaml", *bad, "--max-restarts", "3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "not finite" in done.stderr
    assert "started again" not in done.stdout
