"""Two hosts, joined by the generated files, train to the result of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_hosts import ADDRESSES, NoHosts, call, configure, two_hosts
from signalled import TOOLKIT, begin, rank_pid, steps, until_step

pytestmark = [pytest.mark.usefixtures("launches"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    try:
        with two_hosts() as names:
            yield names
    except NoHosts as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_list_of_hosts_trains_as_one_host(strategy: str, here: Path, hosts: list[str]) -> None:
    alone = call(here, *TOOLKIT, "train", "r.yaml", f"strategy.name={strategy}", "run.output_dir=one")
    assert alone.returncode == 0, alone.stderr
    configure(here, strategy)
    done = call(here, "files/launch-hosts.sh", *hosts, REMOTE="ip netns exec", MAIN_IP=ADDRESSES[0])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert steps(here / "run") == steps(here / "one")


def test_torchruns_rendezvous_trains_and_a_lost_rank_comes_back(here: Path, hosts: list[str]) -> None:
    alone = call(here, *TOOLKIT, "train", "r.yaml", "strategy.name=fsdp2", "run.max_steps=60", "run.output_dir=one")
    assert alone.returncode == 0, alone.stderr
    configure(here, "fsdp2", "run.max_steps=60")
    given = {"PATH": f"{here / 'bin'}:{os.environ['PATH']}", "MAIN_IP": ADDRESSES[0]}
    join = [["ip", "netns", "exec", host, "files/launch-elastic.sh"] for host in hosts]
    jobs = [begin(command, here, NODE_RANK=str(node), **given) for node, command in enumerate(join)]
    until_step(here / "run", 7, jobs[0])
    os.kill(_any_rank(jobs[1].pid), signal.SIGKILL)
    outputs = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert any("restarted automatically, attempt 2" in shown for shown, _ in outputs)
    assert steps(here / "run") == steps(here / "one")


def _any_rank(launcher: int) -> int:
    """The rank below a launcher; the rendezvous says which number it has."""
    for rank in (0, 1):
        try:
            return rank_pid(launcher, rank)
        except AssertionError:
            continue
    raise AssertionError("no rank")


def test_a_host_that_is_killed_ends_the_job_and_the_run_is_gone_on_with(here: Path, hosts: list[str]) -> None:
    configure(here, "zero2", "run.max_steps=60")
    alone = call(here, *TOOLKIT, "train", "r.yaml", "strategy.name=zero2", "run.max_steps=60", "run.output_dir=one")
    assert alone.returncode == 0, alone.stderr
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    given = {"PATH": path, "MAIN_IP": ADDRESSES[0]}
    join = [["ip", "netns", "exec", host, "files/launch.sh"] for host in hosts]
    jobs = [begin(command, here, NODE_RANK=str(node), **given) for node, command in enumerate(join)]
    until_step(here / "run", 7, jobs[0])
    os.kill(rank_pid(jobs[1].pid, 1), signal.SIGKILL)
    os.killpg(jobs[1].pid, signal.SIGKILL)
    jobs[0].communicate(timeout=90)
    assert jobs[0].returncode not in (0, None)
    jobs[1].communicate(timeout=10)
    done = call(here, "files/launch-hosts.sh", *hosts, "--", "--resume", REMOTE="ip netns exec", MAIN_IP=ADDRESSES[0])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert steps(here / "run") == steps(here / "one")
