"""Copies of the working tree, in which pytest runs with one mutant at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from product_mutants.catalogue import ROOT, Mutant, find, mutated, read_sources

SETS: dict[str, tuple[str, ...]] = {"default": (), "unit": ("--set", "unit"), "all": ("--set", "all")}
"""Arguments of pytest that select a set of tests (tests/sets.py)."""
OWN = "tests/product_mutants"
TEST_TIMEOUT_S = 180
"""A mutant may hang. A test that takes longer fails; default tests take well under 20 s."""


@dataclass(frozen=True)
class Ran:
    """What came of a run of pytest. ``failed``: of the first test that failed."""

    status: int | None
    """pytest's exit status; None: it took too long."""
    seconds: float
    passed: int
    failed: dict[str, Any] | None
    uncollected: dict[str, Any] | None
    output: str


class Tree:
    """A copy of the tree that git sees, uncommitted changes included, without the list of mutants' own test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        self.notes = folder
        _copy(ROOT, self.folder)

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """The tree has the defect inside."""
        [place] = find(mutant, read_sources(self.folder))
        path = self.folder / place.file
        right = path.read_text(encoding="utf-8")
        _replace(path, mutated(mutant, right))
        try:
            yield
        finally:
            _replace(path, right)

    def pytest(
        self,
        arguments: Sequence[str],
        limit_s: float,
        *,
        tests: Sequence[str] | None = None,
        timeout_s: int = TEST_TIMEOUT_S,
        python: Sequence[str] = ("-m", "pytest"),
        more: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run pytest up to the first failure. ``tests``: only these node ids of what it collects, in this order."""
        notes, chosen, log = (self.notes / name for name in ("notes.jsonl", "tests", "output"))
        notes.unlink(missing_ok=True)
        command = [sys.executable, *python, "-p", "no:cacheprovider", "-p", "tests.product_mutants.noting"]
        command += ["-o", f"timeout={timeout_s}", f"--ignore={OWN}", f"--note={notes}", *arguments]
        if tests is not None:
            chosen.write_text("\n".join(tests) + "\n", encoding="utf-8")
            command += [f"--tests={chosen}", *dict.fromkeys(name.partition("::")[0] for name in tests)]
        environment = os.environ | {"PYTHONPATH": str(self.folder)} | dict(more or {})
        began = time.monotonic()
        with log.open("wb") as output:
            job = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status: int | None = job.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        lines = read_lines(notes)
        failed = next((one for one in lines if one.get("outcome") == "failed" and one["when"] != "collect"), None)
        uncollected = next((one for one in lines if one["when"] == "collect"), None)
        passed = sum(one["when"] == "call" and one["outcome"] == "passed" for one in lines)
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        return Ran(status, round(time.monotonic() - began, 1), passed, failed, uncollected, tail)


@contextlib.contextmanager
def new_tree() -> Iterator[Tree]:
    """A copy in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="product-mutants-")).resolve()
    try:
        yield Tree(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of JSON; a last one that was cut off is not there."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _copy(source: Path, target: Path) -> None:
    listed = subprocess.run(
        ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode:  # no checkout, an unpacked archive for example
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", "build", "dist")
        shutil.copytree(source, target, ignore=ignored, symlinks=True)
        return
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def _replace(path: Path, text: str) -> None:
    """Write a module. Its compiled form goes: within a second it would be taken for that of the new text."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
