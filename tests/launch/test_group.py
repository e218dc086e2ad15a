"""A process group of many jobs: which failures it outlives."""

import multiprocessing
import os
import re
import signal
import time

import pytest

from toolkit.errors import InputError
from toolkit.launch.group import JobFailed, WorkerGroup, _serve

pytestmark = pytest.mark.usefixtures("launches")


def process() -> int:
    return os.getpid()


def refuse(ranks: tuple[int, ...]) -> None:
    """The ranks that do not refuse wait, as in a collective."""
    if int(os.environ["RANK"]) in ranks:
        raise InputError("data.train: no such file")
    time.sleep(600)  # longer than a test may take


def lose_a_rank(how: int, after: float) -> None:
    """Rank 1 is ended by a signal; rank 0 has seen it before."""
    if os.environ["RANK"] == "0":
        raise RuntimeError("Connection closed by peer [127.0.0.1]:52967")
    time.sleep(after)
    if how:
        os.kill(os.getpid(), how)


def answer_late(value: str) -> str:
    time.sleep(0.7)
    return value


def fail() -> None:
    raise ValueError("a defect")


def test_group_takes_jobs_after_all_ranks_refused() -> None:
    with WorkerGroup(2) as group:
        before = group.run(process)
        with pytest.raises(JobFailed) as failed:
            group.run(refuse, (0, 1))
        assert str(failed.value.refused) == "data.train: no such file"
        assert group.run(process) == before


def test_an_interrupted_job_answers_no_later_one() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with WorkerGroup(2) as group:
        group.run(process)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                group.run(answer_late, "first")
        finally:
            signal.signal(signal.SIGALRM, before)
        assert group.run(answer_late, "second") == ["second", "second"]


def test_a_rank_that_its_group_has_given_up_ends_without_a_traceback() -> None:
    here, there = multiprocessing.Pipe()
    rank = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, {"OMP_NUM_THREADS": "1"}, None))
    here.send((answer_late, ("nobody reads it",)))
    rank.start()
    there.close()
    here.close()
    rank.join(60)
    assert rank.exitcode == 0


def test_group_ends_what_waits_for_a_rank_that_refused() -> None:
    with WorkerGroup(2) as group:
        before = group.run(process)
        with pytest.raises(JobFailed) as failed:
            group.run(refuse, (1,))
        assert failed.value.refused is not None
        assert failed.value.rank == 1
        assert not set(group.run(process)) & set(before)


def test_group_is_new_after_a_defect() -> None:
    with WorkerGroup(2) as group:
        before = group.run(process)
        with pytest.raises(JobFailed) as failed:
            group.run(fail)
        assert failed.value.refused is None
        assert not set(group.run(process)) & set(before)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGABRT, r"rank 1 died \(exit code -6\): SIGABRT"),
        (
            signal.SIGKILL,
            r"rank 1 died \(exit code -9\): SIGKILL \(out of host memory\? [\d.]+ of [\d.]+ GiB were left .*\)",
        ),
    ],
)
def test_the_rank_that_died_is_reported_not_the_one_that_lost_it(how: int, message: str) -> None:
    with WorkerGroup(2) as group:
        group.run(process)  # both are there
        with pytest.raises(JobFailed) as failed:
            group.run(lose_a_rank, how, 0.5)
        assert failed.value.rank == 1
        assert re.fullmatch(message, str(failed.value)), str(failed.value)
        group.run(process)


def test_a_lost_connection_without_a_death_is_reported_as_it_is() -> None:
    with WorkerGroup(2) as group:
        with pytest.raises(JobFailed) as failed:
            group.run(lose_a_rank, 0, 60)
        assert failed.value.rank == 0
        assert "Connection closed by peer" in str(failed.value)
