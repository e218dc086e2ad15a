"""What many tests share: tiny data on disk, and one process group for the whole session."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

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
def group() -> Iterator[WorkerGroup]:
    """Two connected processes, kept for every test that needs them. What a test computes itself to compare with them,
    it computes with as many threads: beside other work two are 10 to 20 times slower than one."""
    with WorkerGroup(2) as workers, torch_threads(workers.threads):
        yield workers


@pytest.fixture(scope="session")
def four() -> Iterator[WorkerGroup]:
    """Four connected processes: the least for ranks that hold parts and ranks that hold copies. For slow tests."""
    with WorkerGroup(4) as workers:
        yield workers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes or train are marked, so that `make test-quick` can leave them out."""
    rooms = {"benchmarks", "plan", "training", "verify"}
    for item in items:
        starts = {"group", "here", "four"} & set(getattr(item, "fixturenames", ()))
        if starts or rooms & set(item.path.parts):
            item.add_marker(pytest.mark.group)


_SECONDS: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_unconfigure() -> None:
    """After a long run, where its time went: what takes minutes may belong among the slow tests."""
    if sum(_SECONDS.values()) > 600:
        print("\nseconds by file:")
        for name, seconds in _SECONDS.most_common(40):
            print(f"{seconds:7.0f} {name}")
