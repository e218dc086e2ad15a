"""Saving beside training: the same checkpoint, bounded, and a failure is reported on every rank."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.training import checkpoint, finding, loop
from toolkit.training.run import run
from toolkit.training.saving import Background
from toolkit.training.steps import Steps


def test_what_waits_is_bounded() -> None:
    background, gate, done = Background(), threading.Event(), []
    background(gate.wait)
    background(done.append, 1)
    third = threading.Thread(target=background, args=(done.append, 2))
    third.start()
    third.join(0.3)
    assert third.is_alive(), "a third one would wait in memory"
    gate.set()
    third.join(5)
    assert background.finish() is None
    assert done == [1, 2]


def test_after_a_failure_nothing_more_is_done_and_it_is_reported_once() -> None:
    messages: list[int] = []
    done: list[int] = []
    background = Background(lambda: messages.append(1))

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for action in (fail, lambda: done.append(1), fail):
        background(action)
    assert background.finish() == "No space left on device"
    assert (messages, done) == ([1], [])


def run_beside(resolved: Resolved, mode: str) -> tuple[str, int]:
    """A run whose first checkpoint is sealed late, or not at all; its message, and the last step that was taken."""
    seal, call, right = checkpoint._seal, Steps.__call__, loop.loss_sum
    past_three = threading.Event()
    losses = 0

    def late(writing: Path, target: Path, *rest: Any) -> None:
        if mode == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if mode == "crash":
            time.sleep(1)
        if mode == "beside" and target.name.endswith("2") and not past_three.wait(10):
            raise AssertionError("training waited for the disk")
        seal(writing, target, *rest)

    def seen(self: Steps, pending: Any) -> None:
        call(self, pending)
        if pending.step == 3:
            past_three.set()

    def bad_at_three(*arguments: Any) -> torch.Tensor:
        nonlocal losses
        losses += 1
        loss = right(*arguments)
        return loss * math.inf if mode == "crash" and losses == 2 * resolved.accumulation + 1 else loss

    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    checkpoint._seal, Steps.__call__, loop.loss_sum = late, seen, bad_at_three
    message = ""
    Path(resolved.recipe.run.output_dir).mkdir(parents=True, exist_ok=True)
    try:
        run(resolved, resume=False, screen=None)
    except RunFailed as error:
        message = str(error)
    finally:
        checkpoint._seal, Steps.__call__, loop.loss_sum = seal, call, right
        torch.distributed.destroy_process_group = destroy
    torch.distributed.barrier()
    lines = (Path(resolved.recipe.run.output_dir) / "metrics.jsonl").read_text().splitlines()
    return message, json.loads(lines[-1])["step"]


def recipe(root: Path, folder: Path, strategy: str, **more: Any) -> Resolved:
    settings = {"max_steps": 5, "save_every": 2, "keep": 9, "output_dir": str(folder)} | more
    return resolved_from(recipe_dict(root, strategy={"name": strategy}, run=settings))


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero1", "zero3", "fsdp2"], "zero3", "fsdp2"))
def test_training_goes_on_and_the_checkpoint_is_of_its_step(
    strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    beside, apart = tmp_path / "beside", tmp_path / "apart"
    assert group.run(run_beside, recipe(tiny_root, beside, strategy), "beside") == [("", 5)] * 2
    assert group.run(run_beside, recipe(tiny_root, apart, strategy, async_save=False), "none") == [("", 5)] * 2
    for step in (2, 4, 5):
        name = f"checkpoints/step-{step:08d}"
        right = dict(finding.tensors_of(apart / name))
        seen = dict(finding.tensors_of(beside / name))
        assert seen.keys() == right.keys()
        assert all(torch.equal(seen[key], right[key]) for key in right)


def test_without_it_training_waits(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """What the test above relies on: a checkpoint that is sealed late holds a run up that saves in the foreground."""
    resolved = recipe(tiny_root, tmp_path / "run", "ddp", async_save=False, hang_after=0)
    messages = group.run(run_beside, resolved, "beside")
    assert all("training waited for the disk" in message for message, _ in messages)


def test_a_full_disk_ends_the_run_at_the_next_step(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    answers = group.run(run_beside, recipe(tiny_root, tmp_path / "run", "zero2", max_steps=200, save_every=20), "full")
    for message, last in answers:
        assert "No space left on device" in message
        assert 20 <= last < 30, "not at the next checkpoint, twenty steps on"
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


def test_a_run_that_fails_finishes_what_it_was_saving(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    answers = group.run(run_beside, recipe(tiny_root, tmp_path / "run", "fsdp2"), "crash")
    assert all("not finite" in message for message, _ in answers)
    finding.whole_manifest(tmp_path / "run/checkpoints/step-00000002")
