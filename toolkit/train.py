"""The job itself: ``accelerate launch --config_file DIR/accelerate.yaml -m toolkit.train RECIPE [key=value ...]``.

One process of it. `toolkit train` starts the same with files that it writes; see toolkit/launch/job.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.launch.failure import note_failure
from toolkit.recipe.load import load_recipe
from toolkit.strategies import resolve


def main(arguments: Sequence[str]) -> int:
    """Train; returns the exit status. Ends the process itself where other ranks may still wait for it."""
    resume = "--resume" in arguments
    positional = [argument for argument in arguments if argument != "--resume"]
    rank = int(os.environ.get("RANK", "0"))
    if not positional or positional[0].startswith("-"):
        print("usage: -m toolkit.train RECIPE [section.key=value ...] [--resume]", file=sys.stderr)
        return 2
    folder: Path | None = None
    log: Path | None = None
    terminal = os.dup(2)  # standard error becomes the log
    try:
        recipe = load_recipe(positional[0], positional[1:])
        resolved = resolve(recipe, positional[0])
        folder = Path(recipe.run.output_dir)
        from toolkit.launch.output import claim_folder
        from toolkit.training.screen import move_log, quiet

        log = folder / "logs" / f"rank{rank}.log"
        connected: Callable[[], None] | None = None
        if "TOOLKIT_LAUNCHED" not in os.environ:
            if rank == 0:
                claim_folder(resolved, resume=resume)
            else:
                # Nothing may lie in the folder before rank 0 has claimed it, as it has once ranks are connected.
                final, log = log, Path(tempfile.mkdtemp(prefix="toolkit-")) / log.name
                connected = partial(move_log, log, final)
        screen = quiet(log)
        from toolkit.training.run import run

        run(resolved, resume=resume, screen=screen, connected=connected)
    except ToolkitError as error:
        _tell(terminal, rank, str(error), error.exit_code)
        return _leave(error.exit_code)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}".strip()
        kept = folder / "logs" / f"rank{rank}.log" if folder else None
        where = kept if kept and kept.exists() else log or "the output above"
        _tell(terminal, rank, f"rank {rank} failed: {message}\nits traceback is in {where}", 1)
        return _leave(1)
    return _leave(0)


def _tell(terminal: int, rank: int, message: str, code: int) -> None:
    """To the launcher where there is one, else to the terminal; ranks that fail alike leave it to rank 0."""
    if note_failure(rank, message, code):
        return
    if rank:
        time.sleep(1.0)  # rank 0 ends the job if it has failed too
    os.write(terminal, f"{message}\n".encode())


def _leave(code: int) -> int:
    """Exit at once. Threads of the collectives would keep a failed process alive, and the job with it; at the end of a
    finished one they have been seen to abort the interpreter (torch 2.13.0, gloo), and the job counted as failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
