"""The job itself: ``accelerate launch --config_file DIR/accelerate.yaml -m toolkit.train RECIPE [key=value ...]``.

One process of it. `toolkit train` starts the same with files that it writes; see toolkit/launch/job.py.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.command_line import name_overrides
from toolkit.errors import OutOfMemory, Stopped, ToolkitError
from toolkit.launch.failure import FOLDER_VARIABLE, nonretryable_exit_code, note_failure
from toolkit.launch.signals import attempt, die_with_parent, note_rank, note_stop
from toolkit.recipe.load import load_recipe
from toolkit.strategies import resolve

if TYPE_CHECKING:
    from toolkit.recipe.schema import Recipe
    from toolkit.training.stop import Stop


def main(arguments: Sequence[str]) -> int:
    """Train; returns the exit status. Exits the process itself if other ranks may still wait for it."""
    resume = "--resume" in arguments or attempt() > 0
    extend = "--extend" in arguments
    changed_data = "--changed-data" in arguments
    dry = "--dry-run" in arguments
    positional = [one for one in arguments if one not in ("--resume", "--extend", "--changed-data", "--dry-run")]
    rank = int(os.environ.get("RANK", "0"))
    if not positional or positional[0].startswith("-"):
        print(
            "usage: -m toolkit.train RECIPE [section.key=value ...] [--dry-run | --resume [--extend] [--changed-data]]",
            file=sys.stderr,
        )
        return 2
    if (extend or changed_data) and not resume:
        print(f"{'--extend' if extend else '--changed-data'}: requires --resume", file=sys.stderr)
        return 2
    if dry and "--resume" in arguments:
        print("--dry-run: starts from the model, not from a checkpoint; leave --resume out", file=sys.stderr)
        return 2
    if attempt() and (code := nonretryable_exit_code()) is not None:
        return code
    stop = _begin(rank)
    folder: Path | None = None
    log: Path | None = None
    aside: Path | None = None
    terminal = os.dup(2)  # standard error becomes the log
    try:
        recipe = load_recipe(positional[0], positional[1:])
        resolved = resolve(recipe, positional[0])
        folder = Path(recipe.run.output_dir)
        from toolkit.launch.output import claim_folder, hold_as_rank_0
        from toolkit.training.screen import move_log, quiet

        log = folder / "logs" / f"rank{rank}.log"
        connected: Callable[[], None] | None = None
        if dry and "TOOLKIT_LAUNCHED" not in os.environ:
            folder = aside = Path(tempfile.mkdtemp(prefix="toolkit-dry-run-"))  # each rank's own: nothing is shared
            resolved = resolve(with_folder(recipe, folder), positional[0])
            log = folder / "logs" / f"rank{rank}.log"
        elif "TOOLKIT_LAUNCHED" not in os.environ:
            if rank == 0:
                claim_folder(resolved, resume=resume)
            else:
                # Nothing may lie in the folder before rank 0 has claimed it, as it has once ranks are connected.
                final, log = log, Path(tempfile.mkdtemp(prefix="toolkit-")) / log.name
                connected = partial(move_log, log, final)
        if rank == 0 and aside is None:
            hold_as_rank_0(folder, resolved.source)
        screen = quiet(log)
        fresh_store = os.environ.get("TOOLKIT_RENDEZVOUS") == "c10d"  # by torchrun, at every start
        if attempt() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not fresh_store:
            from toolkit.strategies.engines.connect import new_rendezvous

            new_rendezvous(attempt())
        from toolkit.training.run import run

        run(
            resolved,
            resume=resume,
            extend=extend,
            changed_data=changed_data,
            screen=screen,
            connected=connected,
            stop=stop,
            hung=partial(_hung, terminal, rank, folder),
            again=_again(positional, recipe.machine.nodes),
            dry=dry,
        )
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    except Stopped as error:
        if note_stop(str(error), error.number):
            return _leave(0)  # the launcher reports it; for torchrun's agent a stopped run has not failed
        if rank == 0:
            os.write(terminal, f"{error}\n".encode())
        return _leave(error.exit_code)
    except OutOfMemory as error:
        traceback.print_exc()
        memory = {"device_gib": error.device_gib, "address_gib": error.address_gib}
        message = str(error)
        if FOLDER_VARIABLE not in os.environ:  # no launcher that asks the plan
            device = "" if error.device_gib is None else f" --memory {error.device_gib:.1f}"
            message += f"\nwhat would fit: toolkit plan {shlex.join(positional)}{device}"
        _report(terminal, rank, message, 1, retryable=False, memory=memory)
        return _leave(1)
    except ToolkitError as error:
        _report(terminal, rank, name_overrides(str(error), positional), error.exit_code, retryable=False)
        return _leave(error.exit_code)
    except BaseException as error:  # any error: the other ranks must not wait for this one
        traceback.print_exc()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            where = f"{error.filename}: " if error.filename else ""
            reason = f"{where}{error.strerror}: the run cannot write. Its checkpoints are intact; resume with --resume"
            _report(terminal, rank, f"{folder}: {reason}", 1, retryable=False)
            return _leave(1)
        message = f"{type(error).__name__}: {error}".strip()
        kept = folder / "logs" / f"rank{rank}.log" if folder else None
        where = str(kept if kept and kept.exists() else log or "the output above")
        _report(terminal, rank, f"rank {rank} failed: {message}\nthe traceback is in {where}", 1)
        return _leave(1)
    return _leave(0)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


def _begin(rank: int) -> Stop:
    """Before there is anything to save, a signal ends this process at once, except the warning, which is delayed."""
    from toolkit.training.stop import Stop

    note_rank(rank)
    die_with_parent()()
    faulthandler.enable()  # a crash in C++ writes where in Python it was, to the log once that is standard error
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop = Stop()
    stop.listen([signal.SIGUSR1])
    return stop


def with_folder(recipe: Recipe, folder: Path) -> Recipe:
    """``recipe``, whose run writes into ``folder`` and reports to no tracker."""
    run_section = recipe.run.model_copy(update={"output_dir": str(folder), "trackers": []})
    return recipe.model_copy(update={"run": run_section})


def _again(positional: Sequence[str], nodes: int) -> str:
    """The command that resumes this job."""
    if nodes > 1:
        return "launch.sh --resume, on every node"
    return f"toolkit train {shlex.join(positional)} --resume"


def _hung(terminal: int, rank: int, folder: Path, message: str) -> None:
    """End this rank of a job that hangs."""
    _report(
        terminal,
        rank,
        f"{message}\nthe stack of every rank is at the end of its log in {folder / 'logs'}",
        1,
        cause=True,
    )
    os._exit(1)


def _report(
    terminal: int,
    rank: int,
    message: str,
    code: int,
    *,
    retryable: bool = True,
    cause: bool = False,
    memory: dict[str, float | None] | None = None,
) -> None:
    """Report to the launcher, or to the terminal if there is none; if several ranks fail, rank 0 reports. ``memory``:
    of a rank that has found none."""
    if note_failure(rank, message, code, retryable=retryable, cause=cause, memory=memory):
        return
    if rank:
        time.sleep(1.0)  # rank 0 ends the job if it has failed too
    os.write(terminal, f"{message}\n".encode())


def _leave(code: int) -> int:
    """Exit at once. Threads of the collectives would keep a failed process, and the job, alive; after a completed job
    they can abort the interpreter (torch 2.13.0, gloo), and the job would count as failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    return code
