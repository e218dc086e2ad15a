"""A real sshd on each of two hosts, and a job that stands in for training: it starts at once and notes what it saw."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch_hosts import ADDRESSES, NoHosts, interface, two_hosts

_SSHD = """\
Port 2222
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """\
Host *
  Port 2222
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  BatchMode yes
  LogLevel ERROR
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  ConnectTimeout 10
"""


@dataclass
class Hosts:
    """Two addresses that ssh reaches from the first host."""

    names: list[str]
    """Their network namespaces."""
    folder: Path

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder}/client"

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The cable between the two is out, and nobody is notified."""
        subprocess.run(["ip", "-n", self.names[1], "link", "set", interface(1), "down"], check=True, timeout=10)
        try:
            yield
        finally:
            subprocess.run(["ip", "-n", self.names[1], "link", "set", interface(1), "up"], check=True, timeout=10)


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[Hosts]:
    """Raises NoHosts where sshd, ssh, iproute2 or the right to make network namespaces is missing."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        raise NoHosts("no sshd or ssh (Debian: openssh-server, openssh-client)")
    with two_hosts() as names, contextlib.ExitStack() as stack:
        separation = Path("/run/sshd")  # compiled into Debian's
        if not separation.exists():
            separation.mkdir()
            stack.callback(shutil.rmtree, separation)
        for key in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(command, check=True, timeout=20)
        (folder / "client").write_text(_CLIENT.format(folder=folder))
        hosts = Hosts(names, folder)
        for name, address in zip(names, ADDRESSES, strict=True):
            config, log = folder / f"sshd-{name}", folder / f"sshd-{name}.log"
            config.write_text(_SSHD.format(address=address, folder=folder))
            with log.open("w") as out:
                command = ["ip", "netns", "exec", name, sshd, "-D", "-e", "-f", str(config)]
                server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            stack.callback(_end, server)
            _until_it_answers(hosts, address, log)
        yield hosts


def _until_it_answers(hosts: Hosts, address: str, log: Path) -> None:
    probe = ["ip", "netns", "exec", hosts.names[0], *hosts.ssh.split(), address, "true"]
    for _ in range(20):
        done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        if done.returncode == 0:
            return
        time.sleep(0.2)
    raise NoHosts(f"sshd lets nobody in: {done.stderr.strip()} {log.read_text()[-600:].strip()}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """The server, and what serves a connection that was cut."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    server.wait(20)


_ACCELERATE = """\
#!{python}
# `accelerate`, as launch.sh calls it: it starts a rank in a session of its own, as torchrun does, and notes both.
import json, os, signal, subprocess, sys
node = os.environ["NODE_RANK"]
rank = subprocess.Popen([sys.executable, {rank!r}, "-m", "toolkit.train"], env=os.environ | {{"RANK": node}},
                        start_new_session=True)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda n, _: rank.send_signal(n))
seen = {{"environment": dict(os.environ), "arguments": sys.argv[1:], "folder": os.getcwd()}}
seen["ids"] = [os.getpid(), rank.pid]
with open(f".seen{{node}}", "w") as file:
    json.dump(seen, file)
os.rename(f".seen{{node}}", f"seen{{node}}.json")
sys.exit(1 if rank.wait() else 0)
"""
_RANK = """\
# Runs until `finish` is there, fails where `fail0` is (of rank 0), and answers a signal as a rank does: it saves. Where
# `deaf` is, it answers none.
import os, signal, sys, time
rank = os.environ["RANK"]
def stop(number, _):
    if os.path.exists("deaf"):
        return
    with open(f"saved{rank}", "w") as file:
        file.write(signal.Signals(number).name)
    os.makedirs("a run", exist_ok=True)
    open("a run/stopped.json", "w").close()
    os._exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, stop)
open(f"ready{rank}", "w").close()
for _ in range(1200):
    if os.path.exists("finish"):
        sys.exit(0)
    if os.path.exists(f"fail{rank}"):
        sys.exit(1)
    time.sleep(0.05)
sys.exit(3)
"""


def stand_in(folder: Path) -> Path:
    """A folder of commands with an `accelerate` that stands in for the real one."""
    commands = folder / "bin"
    commands.mkdir()
    rank = commands / "rank.py"
    rank.write_text(_RANK)
    (commands / "accelerate").write_text(_ACCELERATE.format(python=sys.executable, rank=str(rank)))
    (commands / "accelerate").chmod(0o755)
    return commands
