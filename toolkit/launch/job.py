"""`toolkit train`: check all that can be checked without torch, write the files, launch, and tell how it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.data.preflight import check_data
from toolkit.errors import InputError, NotSo
from toolkit.launch.failure import FOLDER_VARIABLE, SCREEN_VARIABLE, first_failure
from toolkit.launch.files import launch_files, write_files
from toolkit.launch.output import claim_folder
from toolkit.launch.relay import screen
from toolkit.machine import cpu_count, cuda_device_count
from toolkit.recipe.load import load_recipe
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import resolve


def train(recipe_file: str, overrides: Sequence[str], *, resume: bool) -> dict[str, Any]:
    """Train a recipe on this machine; returns the run's result.

    Raises InputError where the recipe cannot run here, NotSo where the run fails.
    """
    resolved = resolve(load_recipe(recipe_file, overrides), recipe_file)
    check_machine(resolved)
    check_data(resolved.recipe)
    undo = claim_folder(resolved, resume=resume)
    folder = Path(resolved.recipe.run.output_dir)
    # Absolute paths: these files are this run's own, wherever they are used from.
    launch_folder = folder.absolute() / "launch"
    write_files(launch_files(resolved, launch_folder, recipe_file, overrides), launch_folder)
    arguments = [recipe_file, *overrides, *(["--resume"] if resume else [])]
    try:
        _launch(launch_folder / "accelerate.yaml", arguments, folder, resolved.recipe.machine.processes)
    except InputError:
        undo()
        raise
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def check_machine(resolved: Resolved) -> None:
    """Raise InputError where this machine cannot run the recipe."""
    machine = resolved.recipe.machine
    if machine.nodes > 1:
        raise InputError(
            f"{resolved.source}: machine.nodes: {machine.nodes} nodes are started by launch.sh on each, or by Slurm; "
            "`toolkit config` writes both"
        )
    if resolved.device == "cuda" and machine.processes > (count := cuda_device_count()):
        raise InputError(
            f"{resolved.source}: machine.processes: {machine.processes} processes, but this machine has {count} GPUs; "
            f"set machine.processes={max(1, count)}" + ("" if count else " and machine.device=cpu")
        )


def _launch(config: Path, arguments: Sequence[str], folder: Path, processes: int) -> None:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    with tempfile.TemporaryDirectory(prefix="toolkit-") as shared:
        # Left alone, torchrun gives every process one thread (or all of them), whatever the machine has.
        threads = {"OMP_NUM_THREADS": str(max(1, cpu_count() // processes))}
        with screen(Path(shared)) as screen_file, (logs / "launcher.log").open("ab") as log:
            told = {FOLDER_VARIABLE: shared, SCREEN_VARIABLE: screen_file, "TOOLKIT_LAUNCHED": "1"}
            job = subprocess.Popen(
                [*command, "-m", "toolkit.train", *arguments], env=threads | os.environ | told, stdout=log, stderr=log
            )
            code = _wait(job)
        if code == 0:
            return
        failure = first_failure(Path(shared))
    if (killed := _killed(logs / "launcher.log")) is not None:
        raise NotSo(f"{killed}; see {logs}")
    if failure is None:
        raise NotSo(f"the run ended with status {code} and no rank said why; see {logs}")
    if failure.exit_code == InputError.exit_code:
        raise InputError(failure.message)
    raise NotSo(failure.message)


def _killed(log: Path) -> str | None:
    """Which rank a signal ended, from torchrun's summary at the end of the launcher's log: it cannot say so itself,
    and the others fail only because it is gone. SIGTERM is torchrun's own, to the ranks that are left."""
    summary = log.read_text(encoding="utf-8", errors="replace")[-20_000:]
    for rank, status in re.findall(r"^ +rank +: (\d+).*\n +exitcode +: (-?\d+)", summary, re.MULTILINE):
        if int(status) < 0 and -int(status) != signal.SIGTERM:
            name = signal.Signals(-int(status)).name
            return f"rank {rank} was ended by {name}" + (" (out of host memory?)" if name == "SIGKILL" else "")
    return None


def _wait(job: subprocess.Popen[bytes]) -> int:
    """Until the job ends, also where Ctrl-C, which the terminal sends to every process of it, ends it."""
    try:
        return job.wait()
    except KeyboardInterrupt:
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGTERM)
            job.wait()
        raise
