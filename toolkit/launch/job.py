"""`toolkit train`: run all checks that do not need torch, write the files, launch, and report the result."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.preflight import check_data
from toolkit.errors import InputError, OutOfMemory, RunFailed, Stopped, ToolkitError
from toolkit.launch.advice import memory_advice
from toolkit.launch.attend import Asked, wait
from toolkit.launch.failure import CRASHES, FOLDER_VARIABLE, SCREEN_VARIABLE, first_failure, last_words
from toolkit.launch.files import launch_files, write_files
from toolkit.launch.host_memory import HostMemory
from toolkit.launch.identity import check_newest
from toolkit.launch.output import check_folder, claim_folder, release_folder
from toolkit.launch.relay import screen, screen_taken
from toolkit.launch.signals import die_with_parent, name_of, noted_stop
from toolkit.machine import cpu_count, cuda_device_count
from toolkit.recipe.compilable import why_no_compiler
from toolkit.recipe.load import recipe_from, recipe_yaml, source_of
from toolkit.recipe.needs import missing_tokenizer, why_no_tokenizer
from toolkit.recipe.preflight import check_known
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.rooms import asked_options
from toolkit.strategies import resolve, strategy_of
from toolkit.terminal import working

if TYPE_CHECKING:
    from toolkit.launch.command import TrainOptions


def train(options: TrainOptions) -> dict[str, Any]:
    """Train a recipe on this machine; returns the run's result.

    Raises InputError if the recipe cannot run here, RunFailed if the run fails, Stopped after a signal.
    """
    if (options.extend or options.changed_data) and not options.resume:
        raise InputError(f"{'--extend' if options.extend else '--changed-data'}: requires --resume")
    if options.dry_run and options.resume:
        raise InputError("--dry-run: starts from the model, not from a checkpoint; leave --resume out")
    resolved = resolve(recipe_from(options.recipe, options.overrides), source_of(options.recipe))
    check_machine(resolved)
    check_known(resolved)
    if (reason := missing_tokenizer(resolved.recipe)) is not None:
        raise InputError(f"{resolved.source}: tokenizer.path: {reason}")
    if resolved.facts.refused:
        raise InputError(f"{resolved.source}: model.path: {resolved.facts.why_unknown}")
    check_data(resolved.recipe)
    if options.resume:
        check_newest(Path(resolved.recipe.run.output_dir), resolved.recipe, resolved.source)
    return _dry_run(options, resolved) if options.dry_run else _train(options, resolved)


def _dry_run(options: TrainOptions, resolved: Resolved) -> dict[str, Any]:
    """The job in a folder of its own, which stays only where the logs of a failure are in it."""
    check_folder(resolved, resume=False)
    folder = Path(tempfile.mkdtemp(prefix="toolkit-dry-run-"))
    elsewhere = [*options.overrides, f"run.output_dir={folder}", "run.trackers=[]"]
    aside = resolve(recipe_from(options.recipe, elsewhere), source_of(options.recipe))
    try:
        found = _train(replace(options, overrides=elsewhere, max_restarts=0), aside)
    except RunFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)
    return found | {"recipe_sha256": resolved.sha256}


def _train(options: TrainOptions, resolved: Resolved) -> dict[str, Any]:
    """Claim the folder, write the files, launch, and read the result."""
    recipe, overrides = options.recipe, options.overrides
    undo = claim_folder(resolved, resume=options.resume)
    folder = Path(resolved.recipe.run.output_dir)
    launch_folder = folder.absolute() / "launch"
    recipe_file = str(launch_folder / "recipe.yaml" if isinstance(recipe, Recipe) else recipe)
    files = launch_files(resolved, launch_folder, recipe_file, overrides, stay=True)
    if isinstance(recipe, Recipe):
        files["recipe.yaml"] = recipe_yaml(recipe)
    write_files(files, launch_folder)
    # Automatic restarts get the same: until it has saved, an extended run resumes from the shorter one's checkpoint.
    arguments = [
        recipe_file,
        *overrides,
        *(["--resume"] if options.resume else []),
        *(["--extend"] if options.extend else []),
        *(["--changed-data"] if options.changed_data else []),
        *(["--dry-run"] if options.dry_run else []),
    ]
    processes = resolved.recipe.machine.processes
    # accelerate starts a single process itself, without torchrun.
    elastic = processes > 1 or strategy_of(resolved).distributed_type in ("DEEPSPEED", "FSDP")
    try:
        _launch(launch_folder / "accelerate.yaml", arguments, folder, processes, options.max_restarts, elastic)
    except OutOfMemory as error:
        raise RunFailed(f"{error}\n{memory_advice(recipe_file, overrides, error)}") from None
    except InputError:
        undo()
        raise
    finally:
        release_folder(folder)
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def check_machine(resolved: Resolved) -> None:
    """Raise InputError if this machine cannot run the recipe, or the recipe lacks something that a run needs."""
    machine = resolved.recipe.machine
    if machine.nodes > 1:
        raise InputError(
            f"{resolved.source}: machine.nodes: {machine.nodes} nodes, but this command starts one; "
            "run launch.sh on each, or use Slurm; "
            "`toolkit config` writes both"
        )
    if (reason := why_no_tokenizer(resolved.recipe)) is not None:
        raise InputError(f"{resolved.source}: tokenizer.path: {reason}")
    if resolved.recipe.compile and (reason := why_no_compiler(resolved.device)):
        raise InputError(f"{resolved.source}: compile: {reason}, or set compile: false")
    for option, settings in asked_options(resolved.recipe):
        if reason := option.why_not_here(settings, resolved.device):
            raise InputError(f"{resolved.source}: {option.key}: {reason}")
    if (base := resolved.base) is not None and (reason := base.why_not_here(resolved.stored, resolved.device)):
        raise InputError(f"{resolved.source}: {reason}")
    if resolved.device == "cuda" and not (count := cuda_device_count()):
        raise InputError(
            f"{resolved.source}: machine.device: cuda, but this machine has no GPU that the NVIDIA driver shows "
            "(`toolkit doctor` looks for the reason); to train without one, set machine.device: cpu"
        )
    if resolved.device == "cuda" and machine.processes > count:
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        raise InputError(
            f"{resolved.source}: machine.processes: {machine.processes} processes, but this machine has {gpus}, and "
            f"each process needs its own; set machine.processes: {count}"
        )


def _launch(
    config: Path, arguments: Sequence[str], folder: Path, processes: int, max_restarts: int, elastic: bool
) -> None:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    if elastic and max_restarts:
        command += ["--max_restarts", str(max_restarts)]
    asked = Asked()
    with asked.listening():
        for again in range(1 if elastic else max_restarts + 1):
            # torchrun's agent uses the same variable; without an agent it is set here.
            count = {"TORCHELASTIC_RESTART_COUNT": str(again)} if again else {}
            ended = _once([*command, "-m", "toolkit.train", *arguments], folder, processes, count, asked)
            if ended is None:
                return
            error, retryable = ended
            if not retryable:
                break
    raise error


def _once(
    command: Sequence[str], folder: Path, processes: int, environment: dict[str, str], asked: Asked
) -> tuple[ToolkitError, bool] | None:
    """One attempt of the job. None if it succeeded, else the error and whether a restart may succeed."""
    logs = folder / "logs"
    with tempfile.TemporaryDirectory(prefix="toolkit-") as name:
        shared = Path(name)
        # By default torchrun gives every process one thread (or all of them), whatever the machine has.
        threads = {"OMP_NUM_THREADS": str(max(1, cpu_count() // processes))}
        with screen(shared) as screen_file, (logs / "launcher.log").open("ab") as log:
            own = {FOLDER_VARIABLE: name, SCREEN_VARIABLE: screen_file, "TOOLKIT_LAUNCHED": "1"}
            begin = log.tell()
            job = subprocess.Popen(
                command,
                env=threads | os.environ | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
            memory = HostMemory()
            with working("starting the processes, loading the model, reading the data", partial(screen_taken, shared)):
                code = wait(job, shared, asked, memory.look)
        stopped, failure = noted_stop(shared), first_failure(shared)
    if stopped is not None:
        return Stopped(*stopped), False
    if asked.numbers and code != 0:
        how = "at once" if len(asked.numbers) > 1 else "before a step was finished"
        next_step = "resume with --resume" if any(folder.glob("checkpoints/step-*")) else "nothing was saved"
        told_how = f"stopped by {name_of(asked.numbers[-1])} {how}; {next_step}"
        return Stopped(told_how, asked.numbers[-1]), False
    if code == 0:
        return None
    if (killed := _killed(logs, begin, memory)) is not None and (failure is None or not failure.cause):
        return RunFailed(f"{killed}; see {logs}"), True
    if failure is None:
        return RunFailed(f"the run ended with status {code}, but no error was reported by any rank; see {logs}"), True
    if failure.exit_code == InputError.exit_code:
        return InputError(failure.message), False
    if failure.memory is not None:
        message = f"{failure.message}\nthe traceback is in {logs / f'rank{failure.rank}.log'}"
        return OutOfMemory(message, **failure.memory), False
    return RunFailed(failure.message), failure.retryable


def _killed(logs: Path, begin: int, memory: HostMemory) -> str | None:
    """The rank that a signal killed, from torchrun's summary at the end of the launcher's log: the rank itself cannot
    report it, and the others fail as a consequence. torchrun itself sends SIGTERM to the remaining ranks."""
    summary = (logs / "launcher.log").read_bytes()[begin:].decode("utf-8", errors="replace")[-20_000:]
    for rank, status in re.findall(r"^ +rank +: (\d+).*\n +exitcode +: (-?\d+)", summary, re.MULTILINE):
        if int(status) < 0 and -int(status) != signal.SIGTERM:
            ended = signal.Signals(-int(status))
            hint = memory.told() if ended == signal.SIGKILL else ""
            crash = last_words(logs / f"rank{rank}.log") if ended in CRASHES else ""
            return f"rank {rank} was ended by {ended.name}{hint}{crash}"
    return None
