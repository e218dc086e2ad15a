"""The sets of tests: every test is in one, says what it starts, and what has passed is not run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import sets
from nights import SIZES
from sets import DEFAULT, ROOT, SETS, set_of, version, why_due

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
MOST = 2600
"""Tests of `make test`: what somebody who changes a line waits for."""


@pytest.mark.parametrize(
    ("marks", "fixtures", "file", "expected"),
    [
        ((), (), "lint/test_rules.py", "unit"),
        ((), ("tmp_path",), "verify/test_faults.py", "unit"),
        (("parametrize",), ("group", "recipe"), "lint/test_x.py", "process"),
        (("usefixtures",), ("launches",), "recipe/test_x.py", "process"),
        (("nightly",), ("group",), "verify/test_x.py", "nightly-verify"),
        (("nightly",), (), "training/test_x.py", "nightly-train"),
        (("nightly",), ("four",), "training/test_x.py", "nightly-mesh"),
        (("nightly",), (), "lint/test_x.py", "nightly-files"),
        (("real",), ("group",), "real/test_x.py", "nightly-real"),
        (("upstream", "nightly"), ("group",), "verify/test_x.py", "upstream"),
        (("weekly", "nightly"), ("four",), "verify/test_x.py", "weekly"),
    ],
)
def test_a_test_is_in_one_set(marks: tuple[str, ...], fixtures: tuple[str, ...], file: str, expected: str) -> None:
    assert set_of(marks, fixtures, ROOT / "tests" / file) == expected


def test_the_default_set_stays_small(pytestconfig: pytest.Config) -> None:
    chosen = pytestconfig.option.keyword or pytestconfig.option.markexpr
    if pytestconfig.args != pytestconfig.getini("testpaths") or chosen:
        pytest.skip("only some tests were collected")
    sizes = pytestconfig.stash[SIZES]
    assert sizes.keys() == SETS.keys(), "a set without a test, or a test without a set"
    assert sum(sizes[name] for name in DEFAULT) <= MOST, sizes


def test_a_version_changes_with_code_and_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "toolkit").mkdir()
    for name in ("constraints.txt", "pyproject.toml", "toolkit/a.py"):
        (tmp_path / name).write_text("pytest==1.0\n", encoding="utf-8")
    monkeypatch.setattr(sets, "ROOT", tmp_path)
    code, packages = version(), version("packages")
    (tmp_path / "toolkit" / "a.py").write_text("changed", encoding="utf-8")
    assert version() != code
    assert version("packages") == packages
    monkeypatch.setattr(sets.metadata, "version", lambda name: "0.0")
    assert version("packages") != packages


def test_what_is_due_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sets, "version", lambda follows="code": f"now-{follows}")

    def seen(name: str, of: str, days: int) -> dict[str, dict[str, str]]:
        return {name: {"version": of, "date": (NOW - timedelta(days=days)).strftime("%Y-%m-%d %H:%M")}}

    assert why_due("unit", {}, NOW) == "never seen green"
    assert why_due("unit", seen("unit", "now-code", 30), NOW) is None
    assert why_due("nightly-mesh", seen("nightly-mesh", "before", 0), NOW) == "the code or the packages have changed"
    assert why_due("weekly", seen("weekly", "before", 6), NOW) is None
    assert why_due("weekly", seen("weekly", "now-code", 8), NOW) == "a week ago"
    assert why_due("upstream", seen("upstream", "now-packages", 1), NOW) is None
    assert why_due("upstream", seen("upstream", "before", 1), NOW) == "the installed packages are others"


HONEST = "def test_quiet():\n    assert True\n"
SECRET = "import subprocess, sys\ndef test_loud():\n    subprocess.run([sys.executable, '-c', ''], check=True)\n"
SAID = SECRET.replace("def test_loud():", "def test_said(launches):")
FORKED = "from multiprocessing import Process\ndef test_forked():\n    Process(target=int).start()\n"


def run_pytest(folder: Path, *options: str) -> str:
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "-v"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout


@pytest.mark.usefixtures("launches")
def test_who_starts_a_process_says_so_and_what_passed_is_not_run_again(tmp_path: Path) -> None:
    for name, text in (("quiet", HONEST), ("loud", SECRET), ("said", SAID), ("forked", FORKED)):
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    ledger = tmp_path / "passed"
    first = run_pytest(tmp_path, "--passed", str(ledger))
    assert "2 failed, 2 passed" in first, first
    assert first.count("says so nowhere") >= 2
    assert {line.partition("::")[2] for line in ledger.read_text().splitlines()} == {"test_quiet", "test_said"}
    again = run_pytest(tmp_path, "--passed", str(ledger))
    assert "2 failed, 2 deselected" in again, again
    chosen = run_pytest(tmp_path, "--set", "process")
    assert "test_said" in chosen
    assert "1 passed, 3 deselected" in chosen, chosen
