"""Starts, stops and resumes runs. A run is a process of its own, in a session of its own: it does not notice when the
server ends, and is found again by the lock on its folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from toolkit.data.preflight import check_data
from toolkit.disk import write_text
from toolkit.errors import InputError
from toolkit.launch.job import check_machine
from toolkit.recipe.earlier import read_earlier
from toolkit.recipe.load import recipe_yaml, validate
from toolkit.recipe.needs import missing_tokenizer
from toolkit.recipe.positions import parse
from toolkit.recipe.preflight import check_known
from toolkit.strategies import resolve
from toolkit.studio.edit import FILE, read_mapping
from toolkit.studio.folders import Folders, read_regular, shown
from toolkit.watching.runs import MARK, holder

_BESIDE = ".studio"
"""Next to a run's folder: its recipe and what `toolkit train` printed. A run's own folder must be new."""
_started: list[tuple[subprocess.Popen[bytes], Path]] = []
"""Processes that were started here, with the run's folder."""
_failed: set[Path] = set()
"""Folders of runs whose last start ended with an error."""


def start(folders: Folders, text: str) -> Path:
    """Save the recipe next to its run folder and start `toolkit train`; returns the run's folder.

    Raises InputError if the recipe is not valid or its folder is outside, or in use.
    """
    read_mapping(text)
    recipe = validate(parse(text, FILE))
    if recipe.model.trust_remote_code:
        raise InputError("model.trust_remote_code: start a run of a model with code of its own in a terminal")
    folder = folders.inside(os.path.abspath(recipe.run.output_dir))
    if folder in folders.roots:
        raise InputError("run.output_dir: a folder inside of the one that studio was started with is expected")
    if holder(folder) is not None:
        raise InputError(f"run.output_dir: {shown(recipe.run.output_dir)}: in use by a running job")
    resolved = resolve(recipe, FILE)
    check_machine(resolved)
    check_known(resolved)
    if (reason := missing_tokenizer(recipe)) is not None:
        raise InputError(f"tokenizer.path: {reason}")
    check_data(recipe)
    saved = _beside(folder, "recipe.yaml")
    write_text(str(saved), text)
    _launch(folder, [str(saved)])
    return folder


def resume(folders: Folders, name: str) -> Path:
    """Start `toolkit train --resume` with the recipe that the run has noted. Raises InputError."""
    folder = folders.inside(name)
    if holder(folder) is not None:
        raise InputError(f"{shown(name)}: the run is still running")
    try:
        noted = json.loads(read_regular(folder / MARK, 4 << 20))
        recipe = read_earlier(noted["recipe"], noted["recipe_version"], str(folder / MARK))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{shown(name)}: {MARK} cannot be read") from None
    if folders.inside(os.path.abspath(recipe.run.output_dir)) != folder:
        raise InputError(f"{shown(name)}: its recipe names another folder, {shown(recipe.run.output_dir)}")
    saved = _beside(folder, "resumed.yaml")
    write_text(str(saved), recipe_yaml(recipe))
    _launch(folder, [str(saved), "--resume"])
    return folder


def stop(folders: Folders, name: str) -> int:
    """Ask the run to save and to end, as Ctrl-C does; returns the process that was asked. Raises InputError."""
    folder = folders.inside(name)
    process = holder(folder)
    if not process or not _is_ours(process):
        raise InputError(f"{shown(name)}: no running job of this machine holds the folder")
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
    return process


def screen_of(folder: Path) -> Path:
    """The file with what `toolkit train` printed."""
    return _beside(folder, "screen.log")


def reap() -> None:
    """Take note of runs that have ended, so that none stays behind as a zombie."""
    _failed.update(folder for job, folder in _started if job.poll() in (1, 2))
    _started[:] = [(job, folder) for job, folder in _started if job.poll() is None]


def failed(folder: Path) -> bool:
    """Whether the last start of a run here ended before its first step: nothing was trained, and its log says why."""
    return folder in _failed


def failures() -> list[Path]:
    """Folders of runs that this server has started and that failed."""
    return sorted(_failed)


def _beside(folder: Path, name: str) -> Path:
    return folder.parent / _BESIDE / f"{folder.name}-{name}"


def _launch(folder: Path, arguments: list[str]) -> None:
    reap()
    screen = screen_of(folder)
    screen.parent.mkdir(parents=True, exist_ok=True)
    with screen.open("ab") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "toolkit", "train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            close_fds=True,
        )
    _started.append((job, folder))
    _failed.discard(folder)


def _is_ours(process: int) -> bool:
    """Whether a process is one of the toolkit's: a lock of anything else is not a run's. Its command line says so, in a
    word of its own: `-m toolkit`, `-m toolkit.train`, or a program of that name. That the word stands in a path does
    not count: people keep other programs in folders called toolkit."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word == b"toolkit" or word.startswith(b"toolkit.") or _is_program(word) for word in words[1:])


def _is_program(word: bytes) -> bool:
    return word.endswith(b"/toolkit") and not os.path.isdir(word)
