"""The doctor sees what is missing, says what to do, and never breaks itself."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import toolkit.strategies
from toolkit.doctor import commands, devices, machine, packages
from toolkit.doctor.commands import examine
from toolkit.doctor.model import CHECKS, Condition
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategies
from toolkit.verification import run
from toolkit.verification.outcome import Outcome

app = typer.Typer()
app.command("doctor")(commands.doctor_command)
app.callback()(lambda: None)


@pytest.mark.usefixtures("launches")  # a torch with CUDA has DeepSpeed ask nvcc
def test_healthy_here() -> None:
    found = examine()
    assert {"packages", "host", "collectives"} <= {condition.subject for condition in found}
    for condition in found:
        assert condition.found
        assert condition.status == "ok" or condition.advice or condition.status == "note", condition


@pytest.mark.usefixtures("launches")  # a torch with CUDA has DeepSpeed ask nvcc
def test_command_and_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "-"])
    data = json.loads(result.output)
    assert data["schema"] == "toolkit.doctor/1"
    assert result.exit_code == (1 if any(c["status"] == "error" for c in data["conditions"]) else 0)
    text = CliRunner().invoke(app, ["doctor"]).output
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("poor", [True, False])
def test_a_cpu_without_bf16(poor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(devices, "cpu_emulates", lambda dtype: poor)
    found = {condition.subject: condition for condition in devices._without_gpu(torch)}
    assert ("bf16" in found) == poor


def test_unmet_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "0.1" if name == "accelerate" else "99")
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["accelerate>=1.1", "gone; extra == 'x'"])
    found = list(packages.requirements())
    assert found[0].status == "error"
    assert "accelerate>=1.1" in found[0].found


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: None)
    assert "error" in {condition.status for condition in packages.installed()}


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    assert next(iter(machine.shared_memory())).status == "warning"


def test_a_build_lock_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):
        assert not list(devices._build_locks()), "a build is going on"
    (found,) = devices._build_locks()
    assert found.status == "error"
    assert f"rm {lock}" in str(found.advice)
    monkeypatch.setattr(devices.time, "sleep", lambda seconds: lock.unlink())
    assert not list(devices._build_locks()), "it was being removed"


def test_variables_left_in_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: NO\n")
    subjects = [condition.subject for condition in machine.left_behind()]
    assert subjects[:2] == ["accelerate default", "environment"]


def test_a_check_that_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Condition]:
        raise RuntimeError("no")

    monkeypatch.setattr("toolkit.doctor.commands.CHECKS", [*CHECKS[:1], broken])
    assert examine()[-1].status == "warning"
    assert os.getcwd()


@pytest.mark.nightly
@pytest.mark.usefixtures("launches")
def test_every_strategy_is_proven_on_this_installation() -> None:
    done = CliRunner().invoke(app, ["doctor", "--self-test"])
    assert done.exit_code == 0, done.output
    shown = [line for line in done.output.splitlines() if "equivalent to a plain loop" in line]
    assert [line.split()[1] for line in shown] == list(strategies())


@pytest.mark.usefixtures("launches")
def test_a_strategy_that_this_installation_breaks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop divides by one rank too few, and another does not start."""
    single = strategies()["single"]

    def verify(resolved: Resolved, **options: Any) -> Outcome:
        if resolved.recipe.strategy.name == "zero2":
            raise AttributeError("no attribute _private")
        return verified(resolved, **options, fault="accum-no-divide")

    verified = run.verify
    monkeypatch.setattr(run, "verify", verify)
    monkeypatch.setattr(toolkit.strategies, "strategies", lambda: {"single": single, "zero2": strategies()["zero2"]})
    done = CliRunner().invoke(app, ["doctor", "--self-test"])
    assert done.exit_code == 1
    failed = [line for line in done.output.splitlines() if line.startswith("FAIL")]
    broken = [line for line in failed if line.split()[1] in strategies()]  # this machine may have problems of its own
    assert [line.split()[1] for line in broken] == ["single", "zero2"]
    assert "different" in broken[0]
    assert "AttributeError: no attribute _private" in " ".join(done.output.split())


def test_newer_packages_than_the_tested_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: {"torch": "99.0+cpu", "peft": "0.21.2"}.get(name))
    [newer] = list(packages.untested())
    assert newer.found.startswith("torch 99.0+cpu (tested: ")
    assert "peft" not in newer.found
    assert "--self-test" in newer.advice
