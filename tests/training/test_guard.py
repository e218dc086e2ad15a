"""A loss that goes bad stops the run, is skipped, or sends it back, as the recipe says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import loader_for, resolved_from
from nights import nightly_but
from tiny import recipe_dict
from toolkit.errors import RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Run
from toolkit.training import finding, loop
from toolkit.training import run as running
from toolkit.training.guard import IN_A_ROW, SPAN, LossGuard
from toolkit.training.run import run
from toolkit.training.session import open_session


def test_a_spike_is_a_multiple_of_the_mean() -> None:
    guard = LossGuard(Run(loss_spike=2.0), [])
    for _ in range(SPAN - 1):
        assert guard.judge(1.0) is None
    assert guard.judge(5.0) is None, "there is no mean yet"
    assert "over 2 times the mean" in (guard.judge(2.5) or "")
    assert guard.judge(2.3) is None
    assert guard.judge(math.nan) == "the loss is not finite"
    assert len(guard.recent) == SPAN


def test_without_a_limit_only_what_is_not_finite_is_bad() -> None:
    guard = LossGuard(Run(), [1.0] * SPAN)
    assert guard.judge(1e9) is None
    assert guard.judge(math.inf) is not None


def test_it_gives_up() -> None:
    guard = LossGuard(Run(on_bad_loss="skip"), [])
    for step in range(IN_A_ROW - 1):
        guard.skipped(True, step)
    guard.skipped(False, 9)
    for step in range(IN_A_ROW - 1):
        guard.skipped(True, step)
    with pytest.raises(RunFailed, match="in a row"):
        guard.skipped(True, 20)
    for step in range(IN_A_ROW):
        guard.returned(3, step)
    with pytest.raises(RunFailed, match="after the checkpoint of step 3"):
        guard.returned(3, 9)


MORE = ["ddp", "zero1", "zero3", "fsdp1"]
BAD_STEP = 3
"""The window whose loss is made infinite on one rank."""


def bad_run(resolved: Resolved, where: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], str]:
    """A run in which one micro-batch of one rank goes wrong; its metrics, last weights and message."""
    right = loop.loss_sum
    calls = 0

    def loss_sum(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = right(*arguments)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        first_of_step = calls == (BAD_STEP - 1) * resolved.accumulation + 1
        return loss * math.inf if first_of_step and rank == resolved.world_size - 1 else loss

    loop.loss_sum = loss_sum
    destroy, message = torch.distributed.destroy_process_group, ""
    torch.distributed.destroy_process_group = lambda *_: None  # the group is the tests'
    try:
        run(resolved, resume=False, screen=None)
    except RunFailed as error:
        message = str(error)
    finally:
        loop.loss_sum = right
        torch.distributed.destroy_process_group = destroy
    torch.distributed.barrier()
    folder = Path(resolved.recipe.run.output_dir)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = finding.newest(folder / "checkpoints")
    return lines, dict(finding.tensors_of(last)) if last else {}, message


def without_window(resolved: Resolved, left_out: list[int], steps: int) -> dict[str, torch.Tensor]:
    """The same run that never saw some windows: skipping must be no more and no less than that."""
    session = open_session(resolved)
    loader = iter(loader_for(resolved, session.accelerator.process_index))
    progress = loop.Progress()
    for at in range(1, steps + 1):
        window = next(loader)
        if at in left_out:
            progress.step += 1
        else:
            loop.train(session, [window], steps, progress, lambda pending: None)
    return {name: session.engine.full_weight(name) for name in session.engine.shapes}


def recipe(root: Path, folder: Path, strategy: str, **run: Any) -> dict[str, Any]:
    run = {"max_steps": 6, "output_dir": str(folder), "save_every": 1, "keep": 9} | run
    precision = "bf16" if strategy == "zero1" else "fp32"  # DeepSpeed's third optimizer, BF16_Optimizer
    return recipe_dict(root, strategy={"name": strategy}, run=run, precision=precision)


@pytest.mark.parametrize("strategy", nightly_but(["zero2", "fsdp2", *MORE], "fsdp2"))
def test_a_bad_step_is_skipped_and_nothing_else(
    strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    resolved = resolved_from(recipe(tiny_root, tmp_path / "run", strategy, on_bad_loss="skip"))
    (tmp_path / "run").mkdir()
    lines, weights, message = group.run(bad_run, resolved, strategy)[0]
    assert message == ""
    assert [line["skipped"] for line in lines] == [at == BAD_STEP for at in range(1, 7)]
    assert lines[BAD_STEP - 1]["loss"] is None
    expected = group.run(without_window, resolved, [BAD_STEP], 6)[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", nightly_but(["zero2", "fsdp2", *MORE], "zero2"))
def test_it_goes_back_to_the_checkpoint_and_past_the_bad_data(
    strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup
) -> None:
    resolved = resolved_from(recipe(tiny_root, tmp_path / "run", strategy, on_bad_loss="rollback", log_every=1))
    (tmp_path / "run").mkdir()
    lines, weights, message = group.run(bad_run, resolved, strategy)[0]
    assert message == ""
    assert [line["step"] for line in lines] == list(range(1, 7))
    expected = group.run(without_window, resolved, [BAD_STEP], 6)[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero2"], "zero2"))
def test_it_stops_and_says_so(strategy: str, tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    resolved = resolved_from(recipe(tiny_root, tmp_path / "run", strategy))
    (tmp_path / "run").mkdir()
    lines, _, message = group.run(bad_run, resolved, strategy)[0]
    assert message.startswith(f"step {BAD_STEP}: the loss is not finite")
    _, which, state, *causes = message.splitlines()
    row = rf"{re.escape(str(tiny_root))}/train.jsonl:\d+: text"
    assert re.fullmatch(
        rf"not finite: rank 1, micro-batch 1 \({row}; {row}\), and none of the other 3 micro-batches", which
    )
    assert re.fullmatch(
        r"step 2 before it: loss \d\.\d+, gradient norm \d\.\d+; weights before this step: finite.*", state
    )
    assert causes[:2] == ["likely causes, in this order:",
                          "  1. what these rows contain: --resume run.on_bad_loss=skip leaves them out"]  # fmt: skip
    assert lines[-1]["step"] == BAD_STEP
    assert finding.newest(tmp_path / "run/checkpoints") == tmp_path / f"run/checkpoints/step-{BAD_STEP - 1:08d}"


def always_bad(resolved: Resolved, frozen: bool) -> str:
    """The message of a run whose every loss is infinite, from its second step on; ``frozen``: for a frozen weight."""
    right, begun = loop.loss_sum, running.open_session
    calls = 0

    def loss_sum(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return right(*arguments) * (math.inf if calls > resolved.accumulation and not frozen else 1.0)

    def open_bad(*given: Any, **options: Any) -> Any:
        session = begun(*given, **options)
        if frozen:
            weight = next(p for p in session.engine.model.parameters() if not p.requires_grad)
            weight.data.view(-1)[:7] = math.nan
        return session

    loop.loss_sum, running.open_session = loss_sum, open_bad
    try:
        run(resolved, resume=False, screen=None)
    except RunFailed as error:
        return str(error)
    finally:
        loop.loss_sum, running.open_session = right, begun
    return ""


CAUSES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fp16": ({"precision": "fp16"}, [
        f"step {IN_A_ROW + 1}: the loss is not finite, {IN_A_ROW} steps in a row",
        "not finite: 2 of 2 micro-batches, first rank 0, micro-batch 1",
        "weights before this step: finite",
        "1. fp16 holds no number above 65504: precision=bf16 where the GPU has it, else fp32",
        "2. the learning rate, "]),
    "no clipping": ({"optimizer": {"max_grad_norm": None}}, [
        "step 2: the loss is not finite", "not known, the step has changed them (", "1. the learning rate, ",
        "2. nothing clips the gradient: optimizer.max_grad_norm=1.0"]),
    "frozen": ({"adapter": {"r": 4}}, [
        "step 1: the loss is not finite", "it is the first step of this process",
        "1. 7 elements of frozen weights or buffers are not finite: load the model again"]),
    "skip": ({"run": {"on_bad_loss": "skip"}}, [
        f"step {IN_A_ROW + 1}: {IN_A_ROW} steps in a row were skipped", "not finite: 2 of 2 micro-batches",
        "weights before this step: finite", "1. the learning rate, "]),
}  # fmt: skip


@pytest.mark.parametrize("kind", nightly_but(CAUSES, "fp16", "frozen"))
def test_the_likely_causes_are_told_in_order(
    kind: str, tiny_root: Path, tmp_path: Path, lone_group: WorkerGroup
) -> None:
    sections, expected = CAUSES[kind]
    steps = {"max_steps": 9, "output_dir": str(tmp_path), "save_every": 100} | sections.pop("run", {})
    machine = {"device": "cpu", "processes": 1}
    resolved = resolved_from(
        recipe_dict(tiny_root, strategy={"name": "single"}, machine=machine, run=steps, **sections)
    )
    message = lone_group.run(always_bad, resolved, kind == "frozen")[0]
    places = [message.find(part) for part in expected]
    assert -1 not in places, (message, expected)
    assert places == sorted(places), message


def test_there_may_be_nothing_to_go_back_to(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    resolved = resolved_from(recipe(tiny_root, tmp_path / "run", "ddp", on_bad_loss="rollback", save_every=100))
    (tmp_path / "run").mkdir()
    assert "no checkpoint was saved before it" in group.run(bad_run, resolved, "")[0][2]
