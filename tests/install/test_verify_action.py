"""The GitHub Action that verifies a repository's recipes: every recipe, with its kept result, and the worst status."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from toolkit.cli import app

FOLDER = Path(__file__).resolve().parents[2] / "actions" / "verify"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())


Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the script in a repository with three recipes; ``toolkit`` notes how it is called and fails by name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "toolkit").write_text(
        '#!/bin/sh\necho "$@" >> calls\ncase $2 in *weak*) exit 1;; *broken*) exit 2;; esac\n'
    )
    (tmp_path / "bin" / "toolkit").chmod(0o755)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "good.json").write_text("{}")

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        done = subprocess.run(
            ["bash", str(FOLDER / "verify.sh"), *arguments],
            cwd=tmp_path,
            env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        calls = tmp_path / "calls"
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.usefixtures("launches")
def test_every_recipe_is_verified_and_the_worst_status_counts(run: Run) -> None:
    status, answer, calls = run("kept", "a.b=1 c.d=2", "r/good.yaml", "r/weak.yaml", "r/broken.yaml", "r/last.yaml")
    assert status == 2
    assert calls[0] == "verify r/good.yaml a.b=1 c.d=2 --badge kept/good.badge.json --baseline kept/good.json"
    assert calls[1] == "verify r/weak.yaml a.b=1 c.d=2 --badge kept/weak.badge.json"
    assert len(calls) == 4
    assert re.findall(r"::error file=(\S+)::", answer) == ["r/weak.yaml", "r/broken.yaml"]
    assert run("kept", "", "r/weak.yaml")[0] == 1
    assert run("kept", "", "r/good.yaml")[0] == 0


@pytest.mark.usefixtures("launches")
def test_no_recipe_is_an_error(run: Run) -> None:
    status, answer, calls = run("kept", "")
    assert (status, calls) == (2, [])
    assert "no recipes given" in answer


def test_the_action_calls_the_script_with_what_the_command_knows() -> None:
    step = ACTION["runs"]["steps"][1]["run"]
    assert re.findall(r"inputs\.(\w+)", step) == ["results", "overrides", "recipes"]
    output = CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "200"}).stdout
    assert all(option in output for option in ("--badge", "--baseline"))
    assert "constraints.txt" in ACTION["runs"]["steps"][0]["run"]
