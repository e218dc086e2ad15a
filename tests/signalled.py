"""Runs in processes of their own, begun, signalled and awaited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tiny import recipe_dict

TOOLKIT = [sys.executable, "-m", "toolkit"]


def write_recipe(folder: Path, root: Path, **sections: Any) -> None:
    sections.setdefault("run", {"output_dir": "run"})
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe_dict(root, **sections), sort_keys=False))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[tuple[Any, ...]]:
    """What must be the same in two runs that are the same."""
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"], m["tokens"], m["skipped"]) for m in metrics(folder)]


def begin(command: list[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own, as a terminal or a batch system would."""
    return subprocess.Popen(
        command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until_step(run: Path, step: int, job: subprocess.Popen[str], seconds: float = 90.0) -> None:
    """Wait for the run to have taken ``step`` steps."""
    deadline = time.monotonic() + seconds
    log = run / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= step):
        assert time.monotonic() < deadline, "the run does not begin"
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def rank_pid(launcher: int, rank: int) -> int:
    """The process below ``launcher`` that has been given ``rank``."""
    import psutil

    for process in psutil.Process(launcher).children(recursive=True):
        command = process.cmdline()
        is_rank = "toolkit.train" in command and "accelerate.commands.launch" not in command
        if is_rank and process.environ().get("RANK", "0") == str(rank):
            return process.pid
    raise AssertionError("no such rank")
