"""The pre-commit hook: what it checks, what it skips, and that its environment holds what lint imports and no more."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from cases import every_case
from toolkit.linting.examples import ds, fsdp2, zero

ROOT = Path(__file__).resolve().parents[2]
HOOK = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
FLAG, *PINS = HOOK["additional_dependencies"]


def run(*arguments: str) -> tuple[int, str]:
    import typer

    from toolkit.linting.hook import hook

    app = typer.Typer()
    app.command()(hook)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build.sh").write_text("#!/bin/sh\nmake all\n")
    (tmp_path / "zero_shot_tasks.yaml").write_text("- one\n- two\n")
    (tmp_path / "deepspeed_notes.json").write_text('{"title": "not a configuration"}')
    (tmp_path / "clean.yaml").write_text(fsdp2()["accelerate.yaml"])
    (tmp_path / "ds.json").write_text(ds(gradient_cliping=0.5)["ds.json"])
    (tmp_path / "launch.sh").write_text("accelerate launch --num_process 4 train.py\n")


def test_files_of_other_tools_are_skipped() -> None:
    code, output = run("build.sh", "zero_shot_tasks.yaml", "deepspeed_notes.json")
    assert (code, output.strip()) == (0, "clean · 0 files")


def test_a_launch_script_is_checked() -> None:
    code, output = run("build.sh", "launch.sh")
    assert code == 1
    assert "launch.sh:1" in output
    assert "num_process" in output


def test_a_finding_does_not_depend_on_the_other_files_of_the_commit() -> None:
    alone = {name: run(name)[1].splitlines()[:-1] for name in ("launch.sh", "ds.json")}
    code, together = run("launch.sh", "clean.yaml", "ds.json")
    assert code == 1
    assert together.splitlines()[:-1] == alone["launch.sh"] + alone["ds.json"]


def test_a_file_that_cannot_be_read_is_exit_2() -> None:
    Path("deepspeed.json").write_text("{")
    code, output = run("deepspeed.json", "ds.json")
    assert code == 2
    assert output.startswith("deepspeed.json:1")


def test_codes_can_be_ignored() -> None:
    assert run("--ignore", "DS1,AU", "ds.json")[0] == 0


@every_case(
    ("name", "checked"),
    [
        ("accelerate.yaml", True),
        ("configs/fsdp2_8gpu.yml", True),
        ("ds_config.json", True),
        ("train.sh", True),
        ("slurm/job.sbatch", True),
        ("lora/adapter_config.json", True),
        ("mkdocs.yml", False),
        ("setup.py", False),
    ],
)
def test_which_files_pre_commit_passes(name: str, checked: bool) -> None:
    assert bool(re.search(HOOK["files"], name)) == checked


def test_the_environment_is_closed_and_pinned_as_the_tests_run() -> None:
    """--no-deps: what is not in the list is not installed, so each requirement of a listed package must be listed."""
    assert FLAG == "--no-deps"
    pinned = {_name(Requirement(text).name): text for text in PINS}
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(PINS) <= set(constraints), set(PINS) - set(constraints)
    for text in PINS:
        requirement = Requirement(text)
        if not requirement.specifier.contains(installed := importlib.metadata.version(requirement.name)):
            pytest.skip(f"{requirement.name} {installed} is installed: these are not the pinned packages")
        for needed in map(Requirement, importlib.metadata.requires(requirement.name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert _name(needed.name) in pinned, f"{requirement.name} needs {needed}"
                assert needed.specifier.contains(Requirement(pinned[_name(needed.name)]).specifier.__str__()[2:])


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


COMMANDS = {
    "hook": ["toolkit.linting.hook", "launch.sh", "ds.json"],
    "lint": ["toolkit", "lint", "accelerate.yaml", "ds.json", "--json", "out.json"],
    "lint --fix": ["toolkit", "lint", "ds.json", "--fix"],
    "explain code": ["toolkit", "explain", "DS101"],
    "explain key": ["toolkit", "explain", "max_grad_norm", "ds.json"],
    "migrate": ["toolkit", "migrate", "accelerate.yaml", "--to", "fsdp2", "-o", "new"],
}

# Only the standard library, the toolkit itself and the packages of the hook's environment can be imported. A package
# that is imported where it is there (rich looks for attr) may be missing; one that is needed stops the command.
ONLY = """
import importlib.metadata, json, runpy, sys
allowed = set(sys.stdlib_module_names) | {"toolkit"}
for name in %r:
    files = importlib.metadata.files(name) or ()
    allowed |= {file.parts[0].split(".")[0] for file in files}
class Inside:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        inside = name.partition(".")[0] in allowed or name.startswith("_sysconfigdata")
        return self.finder.find_spec(name, path, target) if inside else None
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Inside, sys.meta_path)
statuses = {}
for command, (module, *arguments) in %r.items():
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        statuses[command] = end.code or 0
print("statuses", json.dumps(statuses))
"""


@pytest.mark.usefixtures("launches")
def test_the_commands_import_nothing_outside_of_it(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(zero("zero_stage: 2")["accelerate.yaml"])
    code = ONLY % ([Requirement(text).name for text in PINS], COMMANDS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    statuses = json.loads(done.stdout.rpartition("statuses ")[2])
    assert statuses.keys() == COMMANDS.keys()
    assert set(statuses.values()) <= {0, 1}, statuses
    assert json.loads((tmp_path / "out.json").read_text())["findings"]
