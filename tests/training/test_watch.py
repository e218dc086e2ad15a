"""A job that stands still is ended, and the rank that holds it up is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from signalled import TOOLKIT, begin, rank_pid, until_step, write_recipe
from toolkit.training.watch import Beat, Marks, late, silent

HERE = Beat(7, 3, "counting tokens", False)
BEHIND = Beat(6, 3, "reading data", False)


def test_the_one_behind_is_named() -> None:
    assert late([HERE, BEHIND, HERE], 39, 40) is None
    assert late([HERE, BEHIND, HERE], 41, 40) == (
        "rank 1 hangs at step 3 (reading data): no rank made progress for 41 s"
    )
    assert (late([BEHIND, HERE, BEHIND], 41, 40) or "").startswith("ranks 0, 2 hang at step 3")


def test_what_takes_long_on_every_rank_is_left_alone() -> None:
    assert late([HERE, HERE], 399, 40) is None
    assert (late([HERE, HERE], 401, 40) or "").startswith("every rank hangs at step 3 (counting tokens)")


def test_saving_is_not_timed() -> None:
    assert late([HERE, Beat(5, 2, "saving", True)], 10_000, 40) is None


def test_a_process_that_says_nothing_is_named_whatever_it_was_at() -> None:
    beats = [HERE, Beat(1, 1, "starting", True)]
    assert silent(beats, [1, 39], 40) is None
    assert silent(beats, [1, 41], 40) == (
        "rank 1 hangs: no heartbeat from its process for 41 s (last seen at step 1, starting)"
    )


def test_marks_count() -> None:
    marks = Marks()
    marks.at(1, "a")
    marks.at(1, "b", untimed=True)
    assert (marks.beat.count, marks.beat.place, marks.beat.untimed) == (2, "b", True)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_a_rank_that_hangs_ends_the_job(strategy: str, tmp_path: Path, tiny_root: Path) -> None:
    write_recipe(
        tmp_path, tiny_root, strategy={"name": strategy}, run={"output_dir": "run", "max_steps": 10**6, "hang_after": 8}
    )
    job = begin([*TOOLKIT, "train", "r.yaml"], tmp_path)
    until_step(tmp_path / "run", 3, job)
    os.kill(rank_pid(job.pid, 1), signal.SIGSTOP)
    _, output = job.communicate(timeout=90)  # a stopped rank never ends by itself
    assert job.returncode == 1
    assert output.startswith("rank 1 hangs: no heartbeat from its process"), output
    assert "at step" in output
    log = (tmp_path / "run/logs/rank0.log").read_text()
    assert "toolkit/training/loop.py" in log, "it says where the others wait"
