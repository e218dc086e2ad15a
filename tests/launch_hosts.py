"""Two hosts on one machine: network namespaces with addresses of their own, joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from signalled import TOOLKIT

ADDRESSES = ("10.231.7.1", "10.231.7.2")


class NoHosts(Exception):
    """Namespaces cannot be made here; the reason."""


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names for `ip netns exec`; raises NoHosts."""
    names = [f"tk{os.getpid()}{side}" for side in "ab"]
    ends = [f"tk{os.getpid() % 100_000}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def interface(side: int) -> str:
    """The name of a host's end of the cable."""
    return f"tk{os.getpid() % 100_000}{'ab'[side]}"


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        raise NoHosts("there is no `ip` command (iproute2)") from None
    if done.returncode:
        raise NoHosts(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def call(here: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        command, cwd=here, env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def configure(here: Path, strategy: str, *overrides: str) -> None:
    machine = ["machine.nodes=2", "machine.processes=1"]
    done = call(here, *TOOLKIT, "config", "r.yaml", f"strategy.name={strategy}", *machine, *overrides, "-o", "files")
    assert done.returncode == 0, done.stderr
