"""A run that ends by memory says where it was, what it had taken, and the plan's smallest change that fits."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from signalled import TOOLKIT, write_recipe
from toolkit.launch import advice, host_memory
from toolkit.training.out_of_memory import is_out_of_memory, told
from toolkit.training.watch import Beat

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.5 GiB of which 1.1 GiB is free."
)
PLANT = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "toolkit.training.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def run(module):
            load(module)
            plant(module)
        spec.loader.exec_module = run
        return spec

def plant(loop):
    import torch
    owner, name = {"forward": (loop._Window, "forward"), "backward": (loop._Window, "backward"),
                   "optimizer step": (loop, "learning_rate")}[os.environ["PHASE"]]
    right, calls = getattr(owner, name), []
    def wrong(self, *given):
        calls.append(1)
        if len(calls) == 3:
            if owner is not loop:
                self._mark("micro-batch 1, " + name)
            raise torch.OutOfMemoryError(MESSAGE)
        return right(self, *given)
    setattr(owner, name, wrong)

sys.meta_path.insert(0, Finder())
"""


def chained(cause: BaseException) -> BaseException:
    try:
        try:
            raise cause
        except type(cause) as error:
            raise RuntimeError("in a hook") from error
    except RuntimeError as error:
        return error


def test_every_kind_of_having_no_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**55)
    for error in (real.value, torch.OutOfMemoryError(CUDA), MemoryError(), chained(torch.OutOfMemoryError(CUDA))):
        assert is_out_of_memory(error), repr(error)
    for other in (RuntimeError("shape"), ValueError(), chained(ValueError())):
        assert not is_out_of_memory(other)


def test_the_message_has_step_phase_micro_batch_and_bytes() -> None:
    error = told(torch.OutOfMemoryError(CUDA), Beat(7, 3, "micro-batch 2, backward"), 1, torch.device("cpu"))
    message = r"rank 1 is out of memory at step 3, micro-batch 2, backward: 2.50 GiB asked for, [\d.]+ GiB allocated, "
    assert re.match(message + r"[\d.]+ GiB at the peak before, [\d.]+ GiB for the process$", str(error)), str(error)
    early = told(MemoryError(), Beat(place="loading the model"), 0, torch.device("cpu"))
    assert str(early).startswith("rank 0 is out of memory loading the model: ")


def plan_of(fits: bool, change: str | None) -> str:
    one = {"fits": fits, "peak_bytes": 18 << 30, "reason": "" if fits else "needs 23.0 GiB, 22.3 usable"}
    return json.dumps({"candidates": [one], "smallest_change": change, "usable_bytes": 22 << 30})


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[str]], list[Any]]:
    """Commands that were asked for, and what they answer: status and output."""
    asked: list[list[str]] = []
    answers: list[Any] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[3:])
        status, out, err = answers[len(asked) - 1]
        return subprocess.CompletedProcess(command, status, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    return asked, answers


def test_the_smallest_change_of_the_plan_is_told(plans: tuple[list[list[str]], list[Any]]) -> None:
    asked, answers = plans
    answers.append((1, plan_of(False, "loss=fused (-5.0 GiB: 18.0)"), ""))
    said = advice.memory_advice("r.yaml", ["a.b=c"], 23.5)
    assert said == "the plan: needs 23.0 GiB, 22.3 usable\nto make it fit: loss=fused (-5.0 GiB: 18.0)"
    assert asked == [["plan", "r.yaml", "a.b=c", "--memory", "23.500", "--json", "-"]]


def test_where_the_plan_fits_less_is_asked_for(plans: tuple[list[list[str]], list[Any]]) -> None:
    asked, answers = plans
    answers += [(0, plan_of(True, None), ""), (1, plan_of(False, "batch.micro_size=1"), "")]
    said = advice.memory_advice("r.yaml", [], 23.2)
    assert said.splitlines() == [
        "the plan expects 18.0 GiB, 22.0 usable: does another process use the GPU (nvidia-smi)?",
        "to make it fit: batch.micro_size=1",
    ]
    headroom = float(asked[1][asked[1].index("--headroom") + 1])
    assert 22 / 0.95 * (1 - headroom) < 18, "a plan that fits is held to less than it takes"


def test_a_plan_that_cannot_be_made_says_why(plans: tuple[list[list[str]], list[Any]]) -> None:
    plans[1].append((2, "", "r.yaml: model.path: no config\n"))
    assert advice.memory_advice("r.yaml", [], None) == "no plan: r.yaml: model.path: no config"


def test_what_the_host_had_left_is_the_least_of_the_last_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(host_memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    watched = host_memory.HostMemory()
    for left in (9, 2, 7):
        meminfo.write_text(f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {left << 20} kB\n")
        watched.look()
    assert watched.told() == " 2.0 of 16.0 GiB were left at the least in its last 10 s"
    (tmp_path / "memory.max").write_text(f"{4 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 30}\n")
    watched.look()
    assert watched.told().startswith(" 1.0 of 4.0 GiB")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "phase"),
    [("single", "forward"), ("ddp", "backward"), ("zero2", "optimizer step"), ("fsdp2", "backward")],
)
def test_a_run_without_memory_ends_with_advice_that_fits(
    strategy: str, phase: str, tmp_path: Path, tiny_root: Path, launches: None
) -> None:
    processes = {"machine": {"device": "cpu", "processes": 1}} if strategy == "single" else {}
    write_recipe(
        tmp_path, tiny_root, strategy={"name": strategy}, run={"output_dir": "run", "max_steps": 8}, **processes
    )
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "sitecustomize.py").write_text(PLANT.replace("MESSAGE", repr(CUDA)))
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{tmp_path / 'planted'}:{root}", "PHASE": phase}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *TOOLKIT, "train", "r.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(rf"rank \d is out of memory at step \d, .*{phase}: 2.50 GiB asked for", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "GiB at the peak before" in done.stderr
    assert "the plan expects" in done.stderr


def test_a_machine_that_does_not_say_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1024 kB\n")
    for there in ("meminfo", "absent"):
        monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / there)
        watched = host_memory.HostMemory()
        watched.look()
        assert watched.told() == ""
