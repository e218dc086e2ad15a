"""launch-hosts.sh over real ssh: the environment travels, and no rank outlives what started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs import resolved_from
from launch_hosts import ADDRESSES, NoHosts, call, configure
from launch_ssh import Hosts, ssh_hosts, stand_in
from signalled import TOOLKIT, begin, steps, until_step
from tiny import recipe_dict
from toolkit.launch.files import launch_files, write_files

pytestmark = pytest.mark.usefixtures("launches")

SECRET = "hf_s3cret"
ODD = "two  words; 'quoted' \"twice\" $HOME `id` \\n * ~ # é"
GIVEN = {
    "HF_TOKEN": SECRET,
    "HF_HOME": "/a folder/of models",
    "NCCL_DEBUG": "INFO",
    "NCCL_ODD": ODD,
    "NCCL_LINES": "one\ntwo\n",
    "GLOO_EMPTY": "",
    "CUDA_VISIBLE_DEVICES": "1,0",
    "VIRTUAL_ENV": "/a venv",
    "LD_LIBRARY_PATH": "/libs",
    "PYTHONPATH": "/python path",
    "OMP_NUM_THREADS": "3",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "MINE_1": "passed",
    "MINE_TOO": "passed too",
}
BOUNDS = {"SILENCE": "6", "STOP_GRACE": "2"}
SOON = 60.0
"""Seconds within which ranks must be gone: far above BOUNDS, for a machine that is busy with other things."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    try:
        with ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
            yield made
    except NoHosts as error:
        pytest.skip(f"no hosts with sshd here: {error}")


@pytest.fixture
def job(tmp_path: Path, tiny_root: Path) -> Path:
    """Launch files in a folder with a space in its name, and a stand-in for `accelerate`."""
    folder = tmp_path / "my job"
    folder.mkdir()
    stand_in(folder)
    recipe = recipe_dict(tiny_root, machine={"nodes": 2, "processes": 1}, run={"output_dir": "a run"})
    write_files(launch_files(resolved_from(recipe), "my launch", "recipe.yaml"), folder / "my launch")
    return folder


def start(hosts: Hosts, folder: Path, *arguments: str, script: str = "my launch/launch-hosts.sh", **given: str) -> Any:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    inside = ["ip", "netns", "exec", hosts.names[0], script, *ADDRESSES, *arguments]
    return begin(inside, folder, **({"PATH": path, "REMOTE": hosts.ssh} | BOUNDS | given))


def seen(folder: Path, script: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What each host's job has noted, once its rank has begun."""
    wanted = [folder / f"{name}" for rank in (0, 1) for name in (f"seen{rank}.json", f"ready{rank}")]
    until = time.monotonic() + SOON
    while not all(file.exists() for file in wanted):
        assert script.poll() is None, script.communicate()
        assert time.monotonic() < until, "the hosts' jobs do not begin"
        time.sleep(0.05)
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in (0, 1)]


def left_of(noted: list[dict[str, Any]]) -> list[int]:
    """Processes of the job that are alive."""
    return [i for one in noted for i in one["ids"] if psutil.pid_exists(i) and psutil.Process(i).status() != "zombie"]


def wait_until_none_is_left(noted: list[dict[str, Any]]) -> None:
    until = time.monotonic() + SOON
    while left := left_of(noted):
        assert time.monotonic() < until, f"{left} outlive what started them"
        time.sleep(0.1)


def clients(script: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The ssh of each host, by address."""
    found = [p for p in psutil.Process(script.pid).children(recursive=True) if p.name() == "ssh"]
    return {address: p for p in found for address in ADDRESSES if address in p.cmdline()}


def test_the_environment_and_the_arguments_are_the_same_on_every_host(hosts: Hosts, job: Path) -> None:
    unnamed = {"NOT_NAMED": "stays here"}
    script = start(hosts, job, "--", "--resume", "model.name=a b'c", PASS_ENV="MINE_1 MINE_T*", **GIVEN, **unnamed)
    noted = seen(job, script)
    shown = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in shown if SECRET in " ".join(line)], "a secret on a command line"
    (job / "finish").touch()
    output = script.communicate(timeout=SOON)
    assert script.returncode == 0, output
    for rank, one in enumerate(noted):
        environment = one["environment"]
        assert {name: environment.get(name) for name in GIVEN} == GIVEN
        assert environment["PATH"].split(":")[0] == str(job / "bin")
        assert environment["MAIN_IP"] == ADDRESSES[0]
        assert "NOT_NAMED" not in environment
        assert one["folder"] == str(job)
        assert one["arguments"][-3:] == ["recipe.yaml", "--resume", "model.name=a b'c"]
        assert f"--machine_rank {rank}" in " ".join(one["arguments"])


_SLOW = pytest.mark.nightly


@pytest.mark.parametrize("name", [*(pytest.param(f"SIG{n}", marks=_SLOW) for n in ("TERM", "INT", "HUP")), "SIGUSR1"])
def test_a_signal_lets_every_host_save(name: str, hosts: Hosts, job: Path) -> None:
    number = signal.Signals[name]
    script = start(hosts, job)
    noted = seen(job, script)
    os.kill(script.pid, number)
    output = script.communicate(timeout=SOON)
    assert script.returncode == 128 + number, output
    assert [(job / f"saved{rank}").read_text() for rank in (0, 1)] == [name, name]
    assert left_of(noted) == []


@pytest.mark.nightly
def test_a_second_signal_ends_ranks_that_do_not_answer(hosts: Hosts, job: Path) -> None:
    (job / "deaf").touch()
    script = start(hosts, job)
    noted = seen(job, script)
    os.kill(script.pid, signal.SIGTERM)
    time.sleep(1.0)
    assert len(left_of(noted)) == 4, "the first signal waits for the save, however long it takes"
    os.kill(script.pid, signal.SIGTERM)
    script.communicate(timeout=SOON)
    assert script.returncode not in (0, 143), "nothing was saved"
    assert left_of(noted) == []


@pytest.mark.parametrize("deaf", [pytest.param(False, marks=_SLOW), True], ids=["saves", "deaf"])
def test_a_killed_script_leaves_no_rank(deaf: bool, hosts: Hosts, job: Path) -> None:
    if deaf:
        (job / "deaf").touch()
    script = start(hosts, job)
    noted = seen(job, script)
    os.kill(script.pid, signal.SIGKILL)
    wait_until_none_is_left(noted)
    script.communicate(timeout=SOON)
    if not deaf:
        assert [(job / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("side", [pytest.param(0, marks=_SLOW), 1])
def test_a_killed_ssh_leaves_no_rank_on_any_host(side: int, hosts: Hosts, job: Path) -> None:
    (job / "deaf").touch()
    script = start(hosts, job)
    noted = seen(job, script)
    clients(script)[ADDRESSES[side]].kill()
    _, shown = script.communicate(timeout=SOON)
    assert script.returncode == 128 + signal.SIGKILL
    assert "another host has failed" in shown
    wait_until_none_is_left(noted)


@pytest.mark.nightly
def test_a_host_that_fails_ends_the_others(hosts: Hosts, job: Path) -> None:
    script = start(hosts, job)
    noted = seen(job, script)
    (job / "fail1").touch()
    script.communicate(timeout=SOON)
    assert script.returncode == 1
    assert (job / "saved0").read_text() == "SIGTERM"
    assert left_of(noted) == []


@pytest.mark.nightly
def test_a_cut_network_leaves_no_rank(hosts: Hosts, job: Path) -> None:
    (job / "deaf").touch()
    script = start(hosts, job, REMOTE=f"{hosts.ssh} -o ServerAliveInterval=2 -o ServerAliveCountMax=2")
    noted = seen(job, script)
    with hosts.cut():
        wait_until_none_is_left(noted)
        script.communicate(timeout=SOON)
    assert script.returncode == 255, "what ssh says of a connection that is lost"


@pytest.mark.nightly
def test_a_warned_run_over_ssh_saves_and_is_resumed_to_the_same_result(hosts: Hosts, here: Path) -> None:
    longer = ["strategy.name=zero2", "run.max_steps=60"]
    alone = call(here, *TOOLKIT, "train", "r.yaml", *longer, "run.output_dir=one")
    assert alone.returncode == 0, alone.stderr
    configure(here, "zero2", "run.max_steps=60")
    given = {"script": "files/launch-hosts.sh", "SILENCE": "60", "STOP_GRACE": "60"}
    script = start(hosts, here, **given)
    until_step(here / "run", 7, script)
    os.kill(script.pid, signal.SIGUSR1)
    output = script.communicate(timeout=200)
    assert script.returncode == 128 + signal.SIGUSR1, output
    assert json.loads((here / "run" / "stopped.json").read_text())["signal"] == signal.SIGUSR1
    script = start(hosts, here, "--", "--resume", **given)
    output = script.communicate(timeout=200)
    assert script.returncode == 0, output
    assert steps(here / "run") == steps(here / "one")
