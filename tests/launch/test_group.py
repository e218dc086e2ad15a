"""A process group of many jobs: which failures it outlives."""

import os
import time

import pytest

from toolkit.errors import InputError
from toolkit.launch.group import JobFailed, WorkerGroup


def process() -> int:
    return os.getpid()


def refuse(ranks: tuple[int, ...]) -> None:
    """The ranks that do not refuse wait, as in a collective."""
    if int(os.environ["RANK"]) in ranks:
        raise InputError("data.train: no such file")
    time.sleep(60)


def fail() -> None:
    raise ValueError("a defect")


def test_group_takes_jobs_after_all_ranks_refused() -> None:
    with WorkerGroup(2) as group:
        before = group.run(process)
        with pytest.raises(JobFailed) as failed:
            group.run(refuse, (0, 1))
        assert str(failed.value.refused) == "data.train: no such file"
        assert group.run(process) == before


def test_group_ends_what_waits_for_a_rank_that_refused() -> None:
    with WorkerGroup(2) as group:
        before = group.run(process)
        started = time.monotonic()
        with pytest.raises(JobFailed) as failed:
            group.run(refuse, (1,))
        assert failed.value.refused is not None
        assert failed.value.rank == 1
        assert time.monotonic() - started < 30
        assert not set(group.run(process)) & set(before)


def test_group_is_new_after_a_defect() -> None:
    with WorkerGroup(2) as group:
        before = group.run(process)
        with pytest.raises(JobFailed) as failed:
            group.run(fail)
        assert failed.value.refused is None
        assert not set(group.run(process)) & set(before)
