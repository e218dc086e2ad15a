"""The GitHub Action installs what the pre-commit hook installs, and runs a command that exists."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from toolkit.linting.examples import ds

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def test_same_requirements_as_the_hook() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    install = ACTION["runs"]["steps"][0]["run"].split()
    assert sorted(word for word in install if "==" in word) == sorted(
        word for word in hook["additional_dependencies"] if "==" in word
    )
    assert "--no-deps" in install


@pytest.mark.usefixtures("launches")
def test_its_command_annotates_a_finding(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(ds(gradient_cliping=0.5)["ds.json"])
    line = ACTION["runs"]["steps"][1]["run"]
    for name, described in ACTION["inputs"].items():
        line = line.replace(f"${{{{ inputs.{name} }}}}", described["default"])
    command = [sys.executable, *line.split()[1:]]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stdout.startswith("::error file=ds.json,line=7,col=3,title=DS101::")
