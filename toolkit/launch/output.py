"""A run's folder: it belongs to one recipe, and a run that is started anew moves the earlier one aside."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.earlier import read_earlier, recipe_version
from toolkit.recipe.load import recipe_sha256
from toolkit.recipe.resolve import Resolved

_MARK = "recipe.json"


def claim_folder(resolved: Resolved, *, resume: bool) -> Callable[[], None]:
    """Make ``run.output_dir`` this recipe's; returns what undoes it, for a run that cannot begin.

    The same recipe started again without ``--resume``: the earlier run is renamed, nothing of it is lost. Raises
    InputError where the folder is another recipe's or cannot be written.
    """
    folder = Path(resolved.recipe.run.output_dir)
    check_folder(resolved, resume=resume)
    if (folder / _MARK).exists():
        _hold(folder, resolved.source)
        _hold(folder, resolved.source, RANK_LOCK, keep=False)
    if resume and (folder / _MARK).exists():
        return lambda: None
    earlier = _free_name(folder) if (folder / _MARK).exists() else None
    if earlier:
        folder.rename(earlier)

    def undo() -> None:
        if began(folder):
            return  # what was trained is never taken away, whatever ends the run
        shutil.rmtree(folder, ignore_errors=True)
        if earlier:
            earlier.rename(folder)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _hold(folder, resolved.source)
        content = {
            "recipe_sha256": resolved.sha256,
            "recipe_version": recipe_version(),
            "recipe": resolved.recipe.model_dump(mode="json"),
        }
        (folder / _MARK).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        undo()
        raise InputError(f"run.output_dir: {folder}: {error.strerror}") from None
    return undo


def began(folder: Path) -> bool:
    """Whether a run in ``folder`` has taken a step or saved anything."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or (folder / "checkpoints").exists()


_held: list[int] = []
"""Locks of this process, kept open until it ends."""


LAUNCHER_LOCK, RANK_LOCK = ".lock", ".lock-rank0"
"""The launcher's, and rank 0's: a rank may outlive a launcher that was killed, until it has saved."""


def _hold(folder: Path, source: str, name: str = LAUNCHER_LOCK, *, keep: bool = True) -> None:
    """Two runs in one folder would write over each other: the second is refused for as long as the first lives.

    A record lock: a data worker, forked from rank 0, does not inherit it and hold it past rank 0's end.
    """
    handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        message = "a run is going on in it; wait for it, or give another folder"
        raise InputError(f"{source}: run.output_dir: {folder}: {message}") from None
    except OSError:
        os.close(handle)  # a file system without locks: nothing can be told
        return
    if keep:
        _held.append(handle)
    else:
        os.close(handle)


def hold_as_rank_0(folder: Path, source: str) -> None:
    """For as long as this process lives nobody else may begin a run in ``folder``; raises InputError."""
    _hold(folder, source, RANK_LOCK)


def check_folder(resolved: Resolved, *, resume: bool) -> None:
    """Raise InputError where ``run.output_dir`` is a file, a folder of something else, or another recipe's.

    With ``resume`` the checkpoint itself tells which differences matter.
    """
    folder = Path(resolved.recipe.run.output_dir)
    where = f"{resolved.source}: run.output_dir: {folder}"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{where} is a file")
    mark = folder / _MARK
    if not mark.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{where} holds other files; give an empty or a new folder")
        return
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
        known = _sha256_today(content, mark)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{where}: {mark} cannot be read; give a new folder") from None
    if known != resolved.sha256 and not resume:
        raise InputError(f"{where} holds a run of another recipe; give another folder, or --resume to go on with it")


def _sha256_today(content: dict[str, Any], mark: Path) -> str:
    """Of the recipe in a run's folder, as today's schema has it: with the defaults of keys that are new."""
    try:
        return recipe_sha256(read_earlier(content["recipe"], content.get("recipe_version", 0), mark))
    except InputError:
        return str(content["recipe_sha256"])  # written by a later version: not this recipe


def _free_name(folder: Path) -> Path:
    return next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
