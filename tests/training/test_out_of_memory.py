"""A run that ends by memory says where it was, what it had taken, and the plan's smallest change that fits."""

from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import resolved_from
from nights import nightly_but
from signalled import TOOLKIT, write_recipe
from tiny import LLAMA, recipe_dict
from toolkit.errors import OutOfMemory
from toolkit.launch import advice, host_memory
from toolkit.launch.group import WorkerGroup
from toolkit.no_memory import is_out_of_memory
from toolkit.recipe.resolve import Resolved
from toolkit.training import loop
from toolkit.training.run import memory_error, run
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
    import resource, torch
    if os.environ["PHASE"] == "limit":
        right, calls = loop.learning_rate, []
        def limited(*given):
            calls.append(1)
            if len(calls) == 2:
                mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**24, resource.RLIM_INFINITY))
            return right(*given)
        loop.learning_rate = limited
        return
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
    ours = OSError(errno.ENOMEM, "Cannot allocate memory")
    words = [RuntimeError(one) for one in ("CUDA error: out of memory", "Cuda failure 2 'out of memory'",
             "unable to mmap 4096 bytes from file <m>: Cannot allocate memory (12)")]  # fmt: skip
    known = [real.value, torch.OutOfMemoryError(CUDA), MemoryError(), chained(torch.OutOfMemoryError(CUDA)), ours]
    for error in (*known, *words):
        assert is_out_of_memory(error), repr(error)
    for other in (RuntimeError("shape"), ValueError("out of memory"), chained(ValueError()), OSError(2, "no file")):
        assert not is_out_of_memory(other)


def test_the_message_has_step_phase_micro_batch_and_bytes() -> None:
    error = memory_error(torch.OutOfMemoryError(CUDA), Beat(7, 3, "micro-batch 2, backward"), 1, torch.device("cpu"))
    message = r"rank 1 is out of memory at step 3, micro-batch 2, backward: 2.50 GiB asked for, [\d.]+ GiB allocated, "
    assert re.match(message + r"[\d.]+ GiB at the peak before, [\d.]+ GiB for the process$", str(error)), str(error)
    early = memory_error(MemoryError(), Beat(place="loading the model"), 0, torch.device("cpu"))
    assert str(early).startswith("rank 0 is out of memory loading the model: ")
    assert (error.device_gib, error.address_gib) == (None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (3 << 30, -1))
        limited = memory_error(MemoryError(), Beat(), 0, torch.device("cpu"))
    assert re.search(r"; [\d.]+ of 3.00 GiB of address space are taken \(ulimit -v\)$", str(limited))
    assert limited.address_gib == 3.0


PHASES = ("forward", "backward", "optimizer step")
PLACES = [(strategy, phase) for strategy in ("single", "ddp", "zero2", "fsdp2") for phase in PHASES]


def starved(resolved: Resolved, phase: str) -> str:
    """The message of a rank to which torch refuses memory in a phase of its second step, second micro-batch."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    right, calls = loop.loss_sum, []

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError(CUDA)

    def refuse_step(*_: Any) -> None:
        if len(calls) == 4:
            refuse()

    def loss_sum(*given: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4 and phase == "forward":
            refuse()
        loss = right(*given)
        if len(calls) == 4 and phase == "backward":
            loss.register_hook(refuse)
        return loss

    loop.loss_sum = loss_sum
    hook = register_optimizer_step_pre_hook(refuse_step) if phase == "optimizer step" else None
    try:
        run(resolved, resume=False, screen=None)
    except OutOfMemory as error:
        return str(error)
    finally:
        loop.loss_sum = right
        if hook is not None:
            hook.remove()
    return "it ran to its end"


@pytest.mark.parametrize(("strategy", "phase"), nightly_but(PLACES, *(PLACES[at] for at in (0, 4, 8, 10))))
def test_every_phase_under_every_strategy_is_named(
    strategy: str, phase: str, tiny_root: Path, tmp_path: Path, lone_group: WorkerGroup, group: WorkerGroup
) -> None:
    alone = strategy == "single"
    sections = {"machine": {"device": "cpu", "processes": 1}} if alone else {}
    steps = {"output_dir": str(tmp_path), "max_steps": 3}
    resolved = resolved_from(recipe_dict(tiny_root, strategy={"name": strategy}, run=steps, **sections))
    place = phase if phase == "optimizer step" else f"micro-batch 2, {phase}"
    for rank, message in enumerate((lone_group if alone else group).run(starved, resolved, phase)):
        assert message.startswith(f"rank {rank} is out of memory at step 2, {place}: 2.50 GiB asked for, "), message
        assert "GiB at the peak before" in message


def plan_of(fits: bool, change: str | None) -> str:
    one = {"fits": fits, "needed_bytes": 18 << 30, "reason": "" if fits else "needs 23.0 GiB, 22.3 usable"}
    return json.dumps({"candidates": [one], "smallest_change": change, "usable_bytes": 22 << 30, "headroom": 0.05})


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
    said = advice.memory_advice("r.yaml", ["a.b=c"], OutOfMemory("", 23.5))
    assert said == "the plan: needs 23.0 GiB, 22.3 usable\nto make it fit: loss=fused (-5.0 GiB: 18.0)"
    assert asked == [["plan", "r.yaml", "a.b=c", "--memory", "23.500", "--json", "-"]]


def test_where_the_plan_fits_less_is_asked_for(plans: tuple[list[list[str]], list[Any]]) -> None:
    asked, answers = plans
    answers += [(0, plan_of(True, None), ""), (1, plan_of(False, "batch.micro_size=1"), "")]
    said = advice.memory_advice("r.yaml", [], OutOfMemory("", 23.2))
    assert said.splitlines() == [
        "the plan expects 18.0 GiB, 22.0 usable: does another process use the GPU (nvidia-smi)?",
        "to make it fit: batch.micro_size=1",
    ]
    headroom = float(asked[1][asked[1].index("--headroom") + 1])
    assert 22 / 0.95 * (1 - headroom) < 18, "a plan that fits is held to less than it takes"


def test_a_plan_that_cannot_be_made_says_why(plans: tuple[list[list[str]], list[Any]]) -> None:
    plans[1].append((2, "", "r.yaml: model.path: no config\n"))
    assert advice.memory_advice("r.yaml", [], OutOfMemory("", None)) == "no plan: r.yaml: model.path: no config"


@pytest.mark.nightly
def test_a_run_that_follows_the_advice_fits_by_the_plan(tmp_path: Path, tiny_root: Path, launches: None) -> None:
    """A vocabulary whose logits are most of the memory, on a device that is too small for them."""
    write_recipe(tmp_path, tiny_root, model={"config": LLAMA | {"vocab_size": 32768}}, data={"max_length": 512},
                 batch={"micro_size": 8}, machine={"device": "cuda", "processes": 2})  # fmt: skip
    file, gib = str(tmp_path / "r.yaml"), 2.0
    said = advice.memory_advice(file, [], OutOfMemory("", gib))
    change = re.search(r"to make it fit: (.*) \(-", said)
    assert change is not None, said
    follow = change[1].replace(",", " ").split()
    command = [*TOOLKIT, "plan", file, "--memory", str(gib), "--json", "-"]
    for overrides, fits in (([], False), (follow, True)):
        done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=300, check=False)
        assert json.loads(done.stdout)["candidates"][0]["fits"] is fits, (overrides, done.stdout, done.stderr)
    assert advice.memory_advice(file, follow, OutOfMemory("", gib)).startswith("the plan expects")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 GiB of which 8 are available, with the cgroups of neither version."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n")
    return tmp_path


def write(root: Path, file: str, text: str) -> None:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)


def test_what_the_host_had_left_is_the_least_of_the_last_seconds(host: Path) -> None:
    watched = host_memory.HostMemory()
    for left in (9, 2, 7):
        write(host, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {left << 20} kB\n")
        watched.look()
    assert watched.told() == " (out of host memory? 2.0 of 16.0 GiB were left at the least in its last 10 s)"


JOB = "jobs/of a user/17"
CGROUPS = {
    "v2": (f"0::/{JOB}", {"memory.max": f"{4 << 30}", "memory.current": f"{3 << 30}"}, "cgroup", "memory.events"),
    "v1": (f"9:name=systemd:/\n4:cpu,memory:/{JOB}\n0::/",
           {"memory.limit_in_bytes": f"{4 << 30}", "memory.usage_in_bytes": f"{3 << 30}"}, "cgroup/memory",
           "memory.oom_control"),
}  # fmt: skip


@pytest.mark.parametrize("folder", [JOB, "jobs", ""])
@pytest.mark.parametrize("version", CGROUPS)
def test_a_cgroup_around_the_run_counts_and_so_do_the_kernels_kills(version: str, folder: str, host: Path) -> None:
    """Its own folder, one above it, or the outermost of a container, in which its path is not there."""
    path, files, top, kills = CGROUPS[version]
    write(host, "proc/self/cgroup", f"{path}\n")
    inside = f"{top}/{folder}".rstrip("/")
    for name, text in files.items():
        write(host, f"{inside}/{name}", f"{text}\n")
    write(host, f"{inside}/memory.stat", f"file 9\ninactive_file {1 << 29}\n")
    write(host, f"{inside}/{kills}", "under_oom 0\noom_kill 3\n")
    watched = host_memory.HostMemory()
    watched.look()
    left = "1.5 of 4.0 GiB were left at the least in its last 10 s"
    none = "the kernel has ended no process for lack of it since the start"
    assert watched.told() == f" (out of host memory? {left}; {none})"
    write(host, f"{inside}/{kills}", "under_oom 0\noom_kill 4\n")
    some = "the kernel has ended a process for lack of it since the start"
    assert watched.told() == f" (out of host memory: {some}; {left})"


def trained(folder: Path, phase: str, command: tuple[str, ...] = (*TOOLKIT, "train")) -> str:
    """What a run says that finds no memory in a phase."""
    (folder / "planted").mkdir()
    (folder / "planted" / "sitecustomize.py").write_text(PLANT.replace("MESSAGE", repr(CUDA)))
    environment = {"PYTHONPATH": f"{folder / 'planted'}:{Path(__file__).parents[2]}", "PHASE": phase}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command, "r.yaml"],
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "GiB at the peak before" in done.stderr
    return done.stderr


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
    said = trained(tmp_path, phase)
    assert "the plan expects" in said
    assert re.search(rf"rank \d is out of memory at step \d, .*{phase}: 2.50 GiB asked for", said), said


@pytest.mark.nightly
def test_without_the_launcher_the_command_of_the_plan_is_told(tmp_path: Path, tiny_root: Path, launches: None) -> None:
    """As under Slurm, ssh or another tool's launcher."""
    write_recipe(tmp_path, tiny_root, strategy={"name": "single"}, machine={"device": "cpu", "processes": 1},
                 run={"output_dir": "run", "max_steps": 8})  # fmt: skip
    said = trained(tmp_path, "backward", (sys.executable, "-m", "toolkit.train"))
    assert re.search(r"^rank 0 is out of memory at step \d, .*backward: ", said, re.MULTILINE), said
    assert said.rstrip().endswith("what would fit: toolkit plan r.yaml")


@pytest.mark.nightly
def test_a_limit_on_the_process_is_named(tmp_path: Path, tiny_root: Path, launches: None) -> None:
    """RLIMIT_AS, which `ulimit -v` sets, after the second step: the logits of the third find no room."""
    write_recipe(tmp_path, tiny_root, strategy={"name": "single"}, machine={"device": "cpu", "processes": 1},
                 model={"config": LLAMA | {"vocab_size": 1 << 17}}, data={"packing": True},
                 run={"output_dir": "run", "max_steps": 8})  # fmt: skip
    said = trained(tmp_path, "limit")
    place = r"rank 0 is out of memory at step 3, micro-batch 1, forward: 0.\d\d GiB asked for, "
    assert re.search(place + r".*; [\d.]+ of [\d.]+ GiB of address space are taken \(ulimit -v\)", said), said
    assert "GiB of address space (ulimit -v) is too low; raise it" in said


def test_a_machine_that_does_not_say_ends_no_run(host: Path) -> None:
    write(host, "proc/meminfo", "MemTotal: 1024 kB\n")
    watched = host_memory.HostMemory()
    watched.look()
    assert watched.told() == " (out of host memory?)"
    (host / "proc/meminfo").unlink()
    watched.look()
    assert watched.told() == " (out of host memory?)"
