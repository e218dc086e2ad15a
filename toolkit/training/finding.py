"""The checkpoints of a run: the latest valid one, the best one, and which are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.training.manifest import Share, read_manifest
from toolkit.training.tensor_folder import TensorReader, read_index


def whole_manifest(folder: Path, share: Share = (0, 1)) -> dict[str, Any]:
    """The manifest of a valid checkpoint under its own name; raises InputError. ``share``: see ``read_manifest``."""
    manifest = read_manifest(folder, share=share)
    if folder.name.startswith("step-") and folder.name != f"step-{manifest['step']:08d}":
        raise InputError(f"{folder}: contains step {manifest['step']}; the folder was renamed or swapped")
    return manifest


def newest(folder: Path, tell: Any = print) -> Path | None:
    """The latest valid checkpoint; invalid ones are reported and skipped."""
    return first_valid(reversed(all_checkpoints(folder)), tell, whole_manifest)


def first_valid(candidates: Iterable[Path], tell: Any, check: Callable[[Path], Any]) -> Path | None:
    """The first that ``check`` raises no InputError for; the others are reported."""
    for candidate in candidates:
        try:
            check(candidate)
        except InputError as error:
            tell(f"skipping an invalid checkpoint: {error}")
            continue
        return candidate
    return None


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained weights of a checkpoint, one after another; raises InputError if it is damaged."""
    reader = TensorReader(folder, read_index(folder, whole_manifest(folder))[0])
    for name in reader.names():
        yield name, reader.get(name)


def best(folder: Path) -> Path | None:
    """The checkpoint with the lowest held-out loss, of those that were evaluated when saved."""
    losses: dict[Path, float] = {}
    for candidate in all_checkpoints(folder):
        try:
            loss = read_manifest(candidate, deep=False)["eval_loss"]
        except InputError:
            continue
        if loss is not None:
            losses[candidate] = loss
    return min(losses, key=losses.__getitem__, default=None)


def keep_some(folder: Path, newest: int) -> None:
    """Delete all checkpoints except the latest ones and the best one."""
    good = best(folder)
    for old in all_checkpoints(folder)[:-newest]:
        if old != good:
            shutil.rmtree(old, ignore_errors=True)
