"""The run folder: it belongs to one recipe. A new run of the same recipe moves the earlier run aside."""

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
    """Claim ``run.output_dir`` for this recipe; returns a function that undoes this if the run cannot start.

    If the same recipe is started without ``--resume``, the earlier run is renamed and kept. Raises InputError if the
    folder belongs to another recipe or cannot be written.
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
            return  # never delete training results
        release_folder(folder)
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
    """Whether a run in ``folder`` has completed a step or saved anything."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or (folder / "checkpoints").exists()


_held: dict[Path, list[int]] = {}
"""Locks of this process by folder, held until they are released or the process ends."""


LAUNCHER_LOCK, RANK_LOCK = ".lock", ".lock-rank0"
"""The launcher's lock and rank 0's: a rank may outlive a killed launcher until it has saved."""


def _hold(folder: Path, source: str, name: str = LAUNCHER_LOCK, *, keep: bool = True) -> None:
    """Lock the folder, so that two runs cannot write to it; a second run is rejected.

    A record lock: a data worker forked from rank 0 does not inherit it and cannot hold it longer than rank 0.
    """
    handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        message = "directory in use by a running job; wait for it to end, or set another folder"
        raise InputError(f"{source}: run.output_dir: {folder}: {message}") from None
    except OSError:
        os.close(handle)  # a file system without locks: nothing can be checked
        return
    if keep:
        _held.setdefault(folder.absolute(), []).append(handle)
    else:
        os.close(handle)


def release_folder(folder: Path) -> None:
    """Release this process's locks on the folder: it has finished with it, but lives on, as a notebook does."""
    for handle in _held.pop(folder.absolute(), ()):
        os.close(handle)


def hold_as_rank_0(folder: Path, source: str) -> None:
    """Prevent other runs in ``folder`` while this process lives; raises InputError."""
    _hold(folder, source, RANK_LOCK)


def check_folder(resolved: Resolved, *, resume: bool) -> None:
    """Raise InputError if ``run.output_dir`` is a file, contains other files, or belongs to another recipe.

    With ``resume`` the checkpoint decides which differences are allowed.
    """
    folder = Path(resolved.recipe.run.output_dir)
    where = f"{resolved.source}: run.output_dir: {folder}"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{where} is a file, not a folder")
    mark = folder / _MARK
    if not mark.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise InputError(f"{where} contains other files; set an empty or a new folder")
        return
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
        known = _sha256_today(content, mark)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{where}: {mark} cannot be read; set another folder") from None
    if known != resolved.sha256 and not resume:
        raise InputError(f"{where} contains a run of another recipe; set another folder, or resume it with --resume")


def _sha256_today(content: dict[str, Any], mark: Path) -> str:
    """SHA-256 of the recipe in a run folder, in the current schema: new keys have their defaults."""
    try:
        return recipe_sha256(read_earlier(content["recipe"], content.get("recipe_version", 0), mark))
    except InputError:
        return str(content["recipe_sha256"])  # written by a later version: not this recipe


def _free_name(folder: Path) -> Path:
    return next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
