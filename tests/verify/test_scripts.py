"""Any loop is recorded as it runs, left as it was, and judged: right ones pass, planted defects are found."""

from __future__ import annotations

import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import script_loops as loops
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.verification.outcome import Outcome
from toolkit.verification.scripts import recording, sketch
from toolkit.verification.scripts.calls import Calls, follow
from toolkit.verification.scripts.recording import Recording
from toolkit.verification.scripts.run import _relay, prepare, whole
from toolkit.verification.scripts.session import Session
from toolkit.verification.scripts.verify import ModelOutcome, verify_unit

Judge = Callable[..., ModelOutcome]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Record a loop, on this process or on those of a group, and compare it."""

    def run(job: Any, defect: str = "", group: WorkerGroup | None = None) -> ModelOutcome:
        prepare(tmp_path, steps=3, after=0, on_cpu=False, copies=True)
        if group is None:
            torch.manual_seed(5)
            job(tmp_path, defect)
        else:
            group.run(job, tmp_path, defect)
        (folder,) = (one for one in (tmp_path / "models").iterdir() if (one / "model.pt").exists())
        return verify_unit(folder, copy=tmp_path / "copies" / folder.name)

    return run


def stage(found: ModelOutcome, name: str) -> Any:
    return next(one for one in found.outcome.passes[0].stages if one.name == name)


ALONE = [loops.custom_loss, loops.preferences, loops.scaled, loops.other_optimizer, loops.divided_after]
TOGETHER = [
    loops.accelerated,
    loops.sharded,
    loops.reduced_by_hand,
    loops.partitioned,
    loops.adapters_sharded,
    loops.adapters_partitioned,
]


@pytest.mark.parametrize("job", ALONE)
def test_a_right_loop_on_one_process(job: Any, judge: Judge) -> None:
    found = judge(job)
    assert found.outcome.verdict == "equivalent", found.outcome.difference
    assert stage(found, "gradient").detection_limit < 1e-6
    assert stage(found, "forward").summary == "outputs bit-equal"


@pytest.mark.parametrize("job", nightly_but(TOGETHER, loops.sharded, loops.partitioned))
def test_a_right_loop_on_two_ranks(job: Any, judge: Judge, group: WorkerGroup) -> None:
    found = judge(job, "", group)
    assert found.outcome.verdict == "equivalent", (found.outcome.difference, found.outcome.unproven)
    assert stage(found, "gradient").detection_limit < 1e-5
    assert found.facts.world == 2


@pytest.mark.parametrize(
    ("job", "defect", "where", "diagnosis"),
    [
        (loops.custom_loss, "sums-in-bf16", "gradient", "sums-rounded-to-16-bits"),
        (loops.custom_loss, "not-zeroed", "gradient", "gradient-not-cleared"),
        (loops.preferences, "adapter-without-gradient", "gradient", "no-gradient"),
        (loops.scaled, "clipped-while-scaled", "clip", None),
        (loops.divided_after, "last-tokens", "gradient", "uniform-scale"),
        (loops.divided_after, "divided-twice", "gradient", "micro-batch-weights"),
    ],
)
def test_a_planted_defect_is_found(job: Any, defect: str, where: str, diagnosis: str | None, judge: Judge) -> None:
    check_found(judge(job, defect, None).outcome, where, diagnosis)


@pytest.mark.parametrize(
    ("job", "defect", "where", "diagnosis"),
    [
        (loops.custom_loss, "", "", None),
        (loops.custom_loss, "sums-in-bf16", "gradient", "sums-rounded-to-16-bits"),
        (loops.custom_loss, "not-zeroed", "gradient", "gradient-not-cleared"),
        (loops.scaled, "clipped-while-scaled", "clip", None),
        (loops.divided_after, "divided-twice", "gradient", "micro-batch-weights"),
    ],
)
def test_large_tensors_are_judged_by_their_sketches(
    job: Any, defect: str, where: str, diagnosis: str | None, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every tensor of more than 16 elements were one of a large model."""
    monkeypatch.setattr(sketch, "EXACT", 16)
    made: list[int] = []
    sketching = sketch.sketch_of
    monkeypatch.setattr(sketch, "sketch_of", lambda count, read: made.append(count) or sketching(count, read))
    found = judge(job, defect)
    assert max(made) > 16
    if not defect:
        assert found.outcome.verdict == "equivalent", found.outcome.difference
        assert stage(found, "gradient").detection_limit < 1e-6
    else:
        check_found(found.outcome, where, diagnosis)


def check_found(found: Outcome, where: str, diagnosis: str | None) -> None:
    assert found.verdict == "different"
    assert found.difference is not None
    assert found.difference[1].name == where
    assert (found.diagnosis.id if found.diagnosis else None) == diagnosis


MEAN = (loops.accelerated, "mean-per-micro-batch", "forward", "mean-per-micro-batch")
ADDED = (loops.adapters_sharded, "added-in-bf16", "gradient", "sums-rounded-to-16-bits")


@pytest.mark.parametrize(
    ("job", "defect", "where", "diagnosis"),
    nightly_but(
        [
            MEAN,
            # With as many ranks as micro-batches both are divided by the same number.
            (loops.accelerated, "ranks-divided-twice", "forward", "accumulation-divided-twice"),
            (loops.reduced_by_hand, "tensors-not-reduced", "gradient", "ranks-not-reduced"),
            (loops.sharded, "reduced-in-bf16", "gradient", "sums-rounded-to-16-bits"),
            (loops.adapters_sharded, "later-adapters-without-gradient", "gradient", "no-gradient"),
            ADDED,
            (loops.partitioned, "reduced-in-bf16", "gradient", "sums-rounded-to-16-bits"),
        ],
        MEAN,
        ADDED,
    ),
)
def test_a_planted_defect_of_two_ranks_is_found(
    job: Any, defect: str, where: str, diagnosis: str | None, judge: Judge, group: WorkerGroup
) -> None:
    check_found(judge(job, defect, group).outcome, where, diagnosis)


@pytest.mark.parametrize("job", ALONE)
def test_recording_leaves_a_run_bit_equal(job: Any, tmp_path: Path) -> None:
    prepare(tmp_path, steps=2, after=1, on_cpu=False)
    torch.manual_seed(5)
    assert loops.both(job, tmp_path)


@pytest.mark.parametrize("job", nightly_but(TOGETHER, loops.sharded))
def test_recording_leaves_a_distributed_run_bit_equal(job: Any, tmp_path: Path, group: WorkerGroup) -> None:
    prepare(tmp_path, steps=2, after=0, on_cpu=False)
    assert all(group.run(loops.both, job, tmp_path))


def test_what_is_not_seen_is_said(judge: Judge) -> None:
    found = judge(loops.other_optimizer)
    assert any("SGD" in note and "not seen" in note for note in found.outcome.notes)
    assert {one.name for one in found.outcome.passes[0].stages} == {"ledger", "forward", "gradient", "cross-rank"}


def test_a_gradient_is_kept_as_it_arrived_or_not_at_all() -> None:
    """It is autograd's own tensor, not a copy."""
    model = torch.nn.Linear(4, 4)
    watching = Calls(model)
    given = torch.randn(2, 4)
    model(given).sum().backward()  # ones, of which there is one in memory
    model(given).pow(2).sum().backward()
    changed = model(given)

    def twice(gradient: torch.Tensor) -> None:
        gradient.mul_(2)

    changed.register_hook(twice)
    changed.pow(2).sum().backward()
    taken = [call.outputs[0].gradient for call in watching.take()]
    assert len(taken) == 2
    assert taken[0] is not None
    assert taken[0].equal(torch.ones(2, 4))
    assert taken[1] is not None
    assert taken[1].equal(2 * model(given).detach())
    assert watching.unseen == ["the gradient of an output (output) was changed in place after it arrived"]
    watching.remove()


class _Doubled(torch.autograd.Function):
    """A backward that changes its own result in place before it returns it."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.clone().mul_(2)


def test_a_gradient_that_arrives_twice_is_kept_as_the_sum() -> None:
    model = torch.nn.Linear(4, 4)
    watching = Calls(model)
    given = torch.randn(2, 4)
    output = model(given)
    loss = _Doubled.apply(output).sum()  # type: ignore[no-untyped-call]
    loss.backward(retain_graph=True)
    loss.backward()
    (call,) = watching.take()
    assert call.outputs[0].gradient is not None
    assert call.outputs[0].gradient.equal(torch.full((2, 4), 4.0))
    assert watching.unseen == []
    watching.remove()


class _Answers(torch.nn.Module):
    """Answers with its loss and its logits, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(given)
        return {"loss": logits.pow(2).mean(), "logits": logits}


@pytest.mark.parametrize(("of", "kept"), [("loss", {"loss"}), ("both", {"loss", "logits"}), ("ddp", {"loss"})])
def test_the_gradient_of_logits_is_kept_where_the_script_makes_a_loss_of_them(of: str, kept: set[str]) -> None:
    """DDP passes all outputs of its model through one node."""
    model = _Answers()
    watching = Calls(model)
    answered = model(torch.randn(2, 4))
    if of == "ddp":
        loss, _ = _DDPSink.apply(answered["loss"], answered["logits"])  # type: ignore[no-untyped-call]
    else:
        loss = answered["loss"] + (answered["logits"].sum() if of == "both" else 0.0)
    follow([loss], watching.nodes)
    loss.backward()
    (call,) = watching.take()
    assert {one.name for one in call.outputs if one.gradient is not None} == kept
    assert all(one.arrived for one in call.outputs)
    watching.remove()


class _DDPSink(torch.autograd.Function):
    """As torch 2.13.0 has it: torch/nn/parallel/distributed.py."""

    @staticmethod
    def forward(context: Any, *given: torch.Tensor) -> Any:
        context.set_materialize_grads(False)
        return tuple(one.clone() for one in given)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        return gradients


def test_a_recording_without_room_is_none_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, steps=3, after=0, on_cpu=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(AssertionError, match=r"3 steps of LlamaForCausalLM take 0\.\d MB more, and 0\.0 MB are free"):
        loops.custom_loss(tmp_path)
    assert "recording stopped: 3 steps of" in capsys.readouterr().err
    assert not list((tmp_path / "models").glob("*/*")), "what was written is given back"


def test_a_large_recording_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, steps=3, after=0, on_cpu=False)
    monkeypatch.setattr(recording, "_WORTH_SAYING", 1000)
    loops.custom_loss(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"toolkit: recording steps 1 to 3 of LlamaForCausalLM, 21 tensors: 0\.\d MB at /", line)


def test_an_error_gives_back_what_is_not_complete(tmp_path: Path) -> None:
    prepare(tmp_path, steps=3, after=0, on_cpu=False)
    watching = Session(tmp_path, 3)
    complete, begun = (
        Recording(torch.nn.Linear(300, 300), 3, 0, True, lambda: None, tmp_path / name) for name in ("0", "1")
    )
    complete.done = True
    watching.recordings = [complete, begun]

    def broken() -> None:
        raise RuntimeError("no such attribute")

    watching.guarded(broken)
    assert watching.error == "RuntimeError: no such attribute"
    assert (tmp_path / "0/rank0.tensors").exists()
    assert not (tmp_path / "1/rank0.tensors").exists()
    assert not watching.active


def test_what_a_launcher_says_of_being_stopped_is_not_shown() -> None:
    silent, lines = threading.Event(), deque[str]()

    def told() -> Iterator[bytes]:
        yield b"loss 1.0\n"
        silent.set()
        yield b"torch.distributed.elastic.multiprocessing.api.SignalException\n"

    _relay(told(), lines, silent)  # type: ignore[arg-type]
    assert list(lines) == ["loss 1.0"]


def test_a_script_with_a_hook_of_its_own_on_all_optimizers_is_recorded(tmp_path: Path) -> None:
    called: list[int] = []
    prepare(tmp_path, steps=2, after=0, on_cpu=False)
    model = loops.llama()
    with loops.recording(tmp_path):
        optimizer = torch.optim.AdamW(model.parameters())
        own = register_optimizer_step_post_hook(lambda *_: called.append(1))
        for batch in loops.batches(3):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        own.remove()
    assert len(called) == 3
    assert whole(tmp_path / "models/0")
