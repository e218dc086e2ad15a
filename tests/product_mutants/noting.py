"""A pytest plugin, for runs that a program reads: chooses and orders tests, and writes down what came of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CURRENT = "current"
"""In the folder of ``--contexts``: the number of the test that runs, for processes that it starts or asks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("product mutants")
    group.addoption("--note", type=Path, metavar="FILE", help="write a JSON line for each phase of a test here")
    group.addoption("--tests", type=Path, metavar="FILE", help="run only the tests named here, in this order")
    group.addoption("--contexts", type=Path, metavar="FOLDER", help="label what coverage records by test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Notes(config.getoption("--note"), config.getoption("--contexts")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path: Path | None = config.getoption("--tests")
    if path is None:
        return
    order = {name: at for at, name in enumerate(path.read_text(encoding="utf-8").splitlines())}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


class _Notes:
    def __init__(self, file: Path | None, contexts: Path | None) -> None:
        self._file, self._contexts = file, contexts
        self._number = 0

    def _note(self, **about: Any) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(about) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(test=report.nodeid, when="collect", outcome="failed", message=_last_line(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._contexts is None:
            return
        import coverage

        self._number += 1
        self._note(test=nodeid, when="start", number=self._number)
        waiting = self._contexts / f".{CURRENT}"
        waiting.write_text(f"{self._number}", encoding="utf-8")
        waiting.replace(self._contexts / CURRENT)
        if (recording := coverage.Coverage.current()) is not None:
            recording.switch_context(f"{self._number}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        message = _last_line(report) if report.failed else ""
        seconds = round(report.duration, 3)
        self._note(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=seconds, message=message)


def _last_line(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Of the traceback, what was raised."""
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")] or [report.longreprtext]
    return lines[0].removeprefix("E").strip()[:300]
