"""slurm.sbatch, submitted to Slurm itself: two nodes train to the result of one, and a warned job goes on by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_hosts import NoHosts, call, configure
from launch_slurm import Cluster, slurm_cluster
from signalled import TOOLKIT, steps

pytestmark = [pytest.mark.usefixtures("launches"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        with slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
            yield made
    except NoHosts as error:
        pytest.skip(f"no Slurm here: {error}")


def submit(cluster: Cluster, here: Path) -> str:
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    output = cluster.call("sbatch", "--export=ALL", "files/slurm.sbatch", cwd=here, path=path)
    return output.split()[-1]


def wait_for(cluster: Cluster, job: str, here: Path, seconds: float, *states: str) -> None:
    until = time.monotonic() + seconds
    while (state := cluster.state(job)) not in states:
        shown = "".join(path.read_text()[-3000:] for path in here.glob("*.out"))
        assert time.monotonic() < until, f"{state}: {shown}"
        assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), f"{state}: {shown}"
        time.sleep(0.2)


def test_two_nodes_train_as_one_host(cluster: Cluster, here: Path) -> None:
    alone = call(here, *TOOLKIT, "train", "r.yaml", "strategy.name=zero2", "run.output_dir=one")
    assert alone.returncode == 0, alone.stderr
    configure(here, "zero2")
    wait_for(cluster, submit(cluster, here), here, 150, "COMPLETED")
    assert steps(here / "run") == steps(here / "one")


def test_a_warned_job_saves_is_queued_again_and_goes_on(cluster: Cluster, here: Path) -> None:
    longer = ["run.max_steps=60", "strategy.name=fsdp2"]
    alone = call(here, *TOOLKIT, "train", "r.yaml", *longer, "run.output_dir=one")
    assert alone.returncode == 0, alone.stderr
    configure(here, "fsdp2", "run.max_steps=60")
    job = submit(cluster, here)
    until = time.monotonic() + 150
    log = here / "run/metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= 5):
        assert time.monotonic() < until, "".join(path.read_text()[-3000:] for path in here.glob("*.out"))
        time.sleep(0.1)
    # What `#SBATCH --signal=USR1@120` sends two minutes before the time is over, to the job's steps.
    cluster.call("scancel", "--signal=USR1", job)
    wait_for(cluster, job, here, 60, "PENDING")
    assert (here / "run/stopped.json").exists()
    # Slurm holds a job that is queued again for two minutes.
    wait_for(cluster, job, here, 300, "COMPLETED")
    shown = (here / f"slurm.sbatch-{job}.out").read_text()
    assert "stopped by SIGUSR1" in shown
    assert "resumed from" in shown
    assert steps(here / "run") == steps(here / "one")
