"""A Slurm cluster of two nodes on one machine: network namespaces, each with a host name and a slurmd of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch_hosts import ADDRESSES, NoHosts, two_hosts

NODES = ("tknode1", "tknode2")


@dataclass
class Cluster:
    host: str
    """The namespace of the first node, where jobs are submitted."""
    conf: Path

    def call(self, *command: str, cwd: Path | None = None, path: str | None = None) -> str:
        """Run one of Slurm's commands on the first node; what it printed."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.host, *command], cwd=cwd, capture_output=True, text=True, timeout=10,
            env=os.environ | {"SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1", "PATH": path or os.environ["PATH"]},
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        shown = self.call("scontrol", "show", "job", job, "--oneliner")
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)["JobState"]


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Raises NoHosts where Slurm or namespaces are missing."""
    for command in ("slurmctld", "slurmd", "sbatch", "munged"):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            raise NoHosts(f"no {command} (Debian: slurmctld slurmd slurm-client munge)")
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        for host in hosts:
            names = Path("/etc/netns") / host / "hosts"
            names.parent.mkdir(parents=True)
            stack.callback(shutil.rmtree, names.parent)
            lines = [f"{address} {node}" for address, node in zip(ADDRESSES, NODES, strict=True)]
            names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        conf = _write_conf(folder)
        environment = os.environ | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

        def start(*command: str) -> None:
            log = stack.enter_context((folder / f"{command[-1].split('/')[-1]}.log").open("w"))
            process = subprocess.Popen(command[:-1], env=environment, stdout=log, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)

        munge = ["--socket", f"{folder}/munge.socket", "--key-file", f"{folder}/munge.key", "--pid-file",
                 f"{folder}/munged.pid", "--seed-file", f"{folder}/munge.seed"]  # fmt: skip
        start("munged", "--foreground", "--force", *munge, "munged")
        for _ in range(100):
            if (folder / "munge.socket").exists():
                break
            time.sleep(0.05)

        def on(host: str, node: str, daemon: str, name: str) -> None:
            """With a host name of its own, and a mount where slurmd looks for control groups (it uses none here)."""
            groups = "mount -t tmpfs none /sys/fs/cgroup"
            inside = f"hostname {node}; {groups}; exec {daemon} -D -c"
            start("ip", "netns", "exec", host, "unshare", "--uts", "--mount", "bash", "-c", inside, name)

        on(hosts[0], NODES[0], "slurmctld", "slurmctld")
        for host, node in zip(hosts, NODES, strict=True):
            on(host, node, "slurmd", node)
        cluster = Cluster(hosts[0], conf)
        _wait_for_nodes(cluster, folder)
        yield cluster


def _write_conf(folder: Path) -> Path:
    for name in ("state", *NODES):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={address} CPUs=1" for node, address in zip(NODES, ADDRESSES, strict=True)
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    conf = folder / "slurm.conf"
    conf.write_text(f"""\
ClusterName=toolkit
SlurmctldHost={NODES[0]}({ADDRESSES[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SchedulerParameters=bf_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    return conf


def _wait_for_nodes(cluster: Cluster, folder: Path) -> None:
    shown = ""
    for _ in range(40):
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            shown = cluster.call("sinfo", "--noheader", "--format=%D %t")
            if shown == "2 idle":
                return
        time.sleep(0.25)
    logs = "".join(f"\n{path.name}: {path.read_text()[-600:]}" for path in folder.glob("*.log"))
    raise NoHosts(f"Slurm does not start here: {shown}{logs}")
