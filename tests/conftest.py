"""What many tests share: tiny data on disk, one process group for the whole session, and which set a test is in."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from nights import SIZES
from sets import DEFAULT, SETS, STARTS_PROCESSES, set_of
from tiny import make_text, make_tokenizer
from toolkit.launch.group import WorkerGroup
from toolkit.threads import torch_threads

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests replace what traces run, which no key of a kept trace says.
os.environ["TOOLKIT_PLAN_CACHE"] = "off"


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, train.jsonl (30 ragged samples) and eval.jsonl (9)."""
    root = tmp_path_factory.mktemp("tiny")
    make_tokenizer(root / "tokenizer")
    make_text(root / "train.jsonl", 30)
    make_text(root / "eval.jsonl", 9, seed=1)
    return root


@pytest.fixture(scope="session")
def launches() -> None:
    """Says that a test starts processes of its own: a command, a server, a worker group."""


@pytest.fixture(scope="session")
def lone_group() -> Iterator[WorkerGroup]:
    """One process, for the strategy `single`."""
    with WorkerGroup(1) as workers:
        yield workers


@pytest.fixture(scope="session")
def group() -> Iterator[WorkerGroup]:
    """Two connected processes, kept for every test that needs them. What a test computes itself to compare with them,
    it computes with as many threads: beside other work two are 10 to 20 times slower than one."""
    with WorkerGroup(2) as workers, torch_threads(workers.threads):
        yield workers


@pytest.fixture(scope="session")
def four() -> Iterator[WorkerGroup]:
    """Four connected processes: the least for ranks that hold parts and ranks that hold copies."""
    with WorkerGroup(4) as workers:
        yield workers


def pytest_addoption(parser: pytest.Parser) -> None:
    sets = parser.getgroup("sets of tests (tests/sets.py)")
    sets.addoption("--set", action="append", choices=[*SETS, "all"], help="run this set; without it unit and process")
    sets.addoption("--passed", type=Path, metavar="FILE", help="leave out the tests named here; add those that pass")


def pytest_configure(config: pytest.Config) -> None:
    # Workers start as forks of a process that has imported the heavy packages: what tests ask is what workers compute,
    # not how an interpreter starts, which takes 6 to 10 seconds of processor time for each.
    WorkerGroup.start_method = "forkserver"
    multiprocessing.set_forkserver_preload(["torch", "transformers", "accelerate", "peft", "deepspeed"])
    config.pluginmanager.register(_Groups())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Passed(config.getoption("--passed")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the chosen sets. A test that is asked for by name runs, whatever set it is in."""
    chosen = config.getoption("--set") or (["all"] if any("::" in one for one in config.args) else [*DEFAULT])
    passed = _lines(config.getoption("--passed"))
    kept, left = [], []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        name = set_of((mark.name for mark in item.iter_markers()), fixtures, item.path)
        _SIZES[name] += 1
        (kept if ("all" in chosen or name in chosen) and item.nodeid not in passed else left).append(item)
    config.stash[SIZES] = dict(_SIZES)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


_SIZES: Counter[str] = Counter()
_STARTED: list[str] = []
"""What was started since the last test began, by this process."""


def _watch_starts() -> None:
    """Note every process that this one starts: subprocesses, forks and multiprocessing's, which has no audit event."""

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
            _STARTED.append(f"{event} {arguments[0] if arguments else ''}")

    sys.addaudithook(note)
    right = multiprocessing.process.BaseProcess.start

    def start(self: multiprocessing.process.BaseProcess) -> None:
        _STARTED.append(f"multiprocessing {self.name}")
        right(self)

    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]


_watch_starts()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _STARTED.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that starts a process has a fixture that says so. One that starts none computes with one thread: several
    tests run side by side, and two threads of one small sum wait for each other."""
    alone = not STARTS_PROCESSES & set(getattr(item, "fixturenames", ()))
    with torch_threads(1) if alone and "torch" in sys.modules else contextlib.nullcontext():
        result = yield
    if _STARTED and alone:
        pytest.fail(
            f"it starts processes and says so nowhere ({'; '.join(_STARTED[:3])}): give it the fixture launches"
        )
    return result


def _lines(path: Path | None) -> frozenset[str]:
    return (
        frozenset(path.read_text(encoding="utf-8").splitlines()) if path is not None and path.exists() else frozenset()
    )


class _Groups:
    """What one core runs in a row under `--dist loadgroup`: a file, whose models and fixtures are then made once, or
    what a mark says. What takes long comes first, so that the rest fills the end."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        starting = {item.path for item in items if STARTS_PROCESSES & set(getattr(item, "fixturenames", ()))}
        items.sort(key=lambda item: item.path not in starting)


class _Passed:
    """Writes the names of tests that pass, as they pass, and at the end where the time went."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seconds: Counter[str] = Counter()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not isinstance(report, pytest.SubtestReport):  # a part of its test's report
            self._seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)
        elif self._path is not None and report.when == "teardown" and report.nodeid not in self._failed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        """After a long run, where its time went: what takes minutes may belong into the night."""
        if sum(self._seconds.values()) > 120:
            print("\nseconds by file:")
            for name, seconds in self._seconds.most_common(40):
                print(f"{seconds:7.0f} {name}")
