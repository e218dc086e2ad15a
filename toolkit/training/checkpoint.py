"""Checkpoints: whole tensors by name, in the same format for every strategy, so that any other can resume.

A folder is written under a temporary name, sealed with a manifest, then renamed: it is complete or does not exist.
Dropout and data order are functions of the step, so no random state is saved.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.disk import flush_to_disk
from toolkit.errors import InputError, RunFailed
from toolkit.recipe.earlier import recipe_version
from toolkit.results import versions
from toolkit.strategies.engines.base import OptimizerState
from toolkit.training.identity import check_recipe, identity
from toolkit.training.loop import Progress, sum_over_ranks
from toolkit.training.saving import Background
from toolkit.training.session import Session
from toolkit.training.tensor_folder import (
    MANIFEST,
    TensorReader,
    TensorWriter,
    read_manifest,
    write_manifest,
)

SCHEMA = "toolkit.checkpoint/1"


class Saving:
    """A checkpoint in progress; rank 0 is writing it to disk."""

    def __init__(self, target: Path, writing: Path, background: Background) -> None:
        self.target, self._writing, self._background = target, writing, background

    def settle(self, session: Session) -> Path:
        """Wait until it is complete and renamed; every rank calls it.

        Raises RunFailed on every rank if it cannot be written; earlier checkpoints are intact.
        """
        _together(session, self.finish(), self.target, self._writing)
        return self.target

    def finish(self) -> str | None:
        """Wait for this rank's part; returns the error, if any."""
        return self._background.finish()


def save(session: Session, folder: Path, progress: Progress, eval_loss: float | None = None) -> Path:
    """Write ``folder/step-N`` and wait for it: see ``begin`` and ``Saving.settle``."""
    return begin(session, folder, progress, eval_loss).settle(session)


def begin(
    session: Session,
    folder: Path,
    progress: Progress,
    eval_loss: float | None = None,
    failed: Callable[[], None] | None = None,
) -> Saving:
    """Put every trained tensor together and give it to rank 0's disk, as ``folder/step-N``; every rank calls it.

    Returns when the last tensor is handed over: weights may change from then on. Rank 0 holds at most a tensor more
    than four files of 1 GiB: weights and moments that are collected, one file that waits and one that is written.

    ``eval_loss``: of these weights, where they were evaluated; the best checkpoint is kept. ``failed`` is called, by
    a thread of rank 0, where it cannot be written. Raises RunFailed on every rank where a trained tensor comes back
    empty or of another shape: nothing empty is ever saved.
    """
    engine, main = session.engine, session.accelerator.is_main_process
    target = folder / f"step-{progress.step:08d}"
    writing = folder / f".{target.name}.writing"
    background = Background(failed)
    weights = TensorWriter(writing, "weights", background)
    moments = TensorWriter(writing, "moments", background)
    if main:
        background.now(_make_anew, writing)
    steps: dict[str, int] = {}
    try:
        for name, shape in engine.shapes.items():
            weight = engine.full_weight(name, main_only=True)
            state = engine.full_state(name, main_only=True)
            if tuple(weight.shape) != shape or weight.numel() == 0:
                raise RunFailed(
                    f"{name}: shape {tuple(weight.shape)} differs from the trained {shape}; nothing was saved"
                )
            if not main:
                continue
            weights.add(name, weight)
            if state is not None:
                steps[name] = state.step
                for key, moment in state.moments.items():
                    moments.add(f"{name}.{key}", moment)
        extra = engine.extra_state()
    except BaseException:
        background.finish()
        raise
    if main:
        weights.flush()
        moments.flush()
        recipe = session.resolved.recipe.model_dump(mode="json")
        manifest = {
            "schema": SCHEMA,
            "step": progress.step,
            "updates": progress.updates,
            "recent": list(progress.recent),
            "extensions": list(progress.extensions),
            "eval_loss": eval_loss,
            "recipe_version": recipe_version(),
            "identity": identity(recipe),
            "strategy": session.resolved.recipe.strategy.name,
            "world_size": session.resolved.world_size,
            "versions": versions(),
            "weights": weights.index,
            "moments": moments.index,
            "optimizer_steps": steps,
            "label_names": session.label_names,
            "extra": extra,
        }
        background(_seal, writing, target, recipe, manifest)
        background(_keep, folder, session.resolved.recipe.run.keep)
    return Saving(target, writing, background)


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _seal(writing: Path, target: Path, recipe: dict[str, Any], manifest: dict[str, Any]) -> None:
    (writing / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    write_manifest(writing, manifest)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(writing, target)
    flush_to_disk(target.parent)  # the name too, before an older checkpoint goes


def _together(session: Session, problem: str | None, target: Path, writing: Path) -> None:
    """Wait for rank 0; raises RunFailed on every rank if it could not write."""
    failed = sum_over_ranks(torch.tensor(float(problem is not None), device=session.engine.device))
    if not failed.item():
        return
    if session.accelerator.is_main_process:
        shutil.rmtree(writing, ignore_errors=True)
        cure = "Make the folder writable" if problem == os.strerror(errno.EACCES) else "Free disk space"
        problem = f"{target}: cannot be written: {problem}; {_kept_before(target)}. {cure}, then resume with --resume"
    told = [problem]
    if dist.is_initialized():
        dist.broadcast_object_list(told, src=0, device=session.engine.device)
    raise RunFailed(str(told[0]))


def _kept_before(target: Path) -> str:
    """Describe the earlier checkpoints. Never raises: the other ranks wait for rank 0's message."""
    try:
        whole = [path for path in all_checkpoints(target.parent) if (path / MANIFEST).exists()]
    except OSError:
        return "the other checkpoints cannot be read"
    return f"the latest checkpoint is {whole[-1]} (intact)" if whole else "there is no earlier checkpoint"


def load(session: Session, folder: Path) -> Progress:
    """Load weights, moments and progress from a checkpoint; every rank calls it.

    Raises InputError if it is damaged, or if the recipe cannot resume it. `check_length` compares the run's length.
    """
    manifest = whole_manifest(folder)
    if manifest.get("schema") != SCHEMA:
        raise InputError(f"{folder}: has schema {manifest.get('schema')}, this version reads {SCHEMA}")
    check_recipe(folder, manifest, session.resolved.recipe, session.resolved.source)
    weights = TensorReader(folder, manifest["weights"])
    moments = TensorReader(folder, manifest["moments"])
    for name in session.engine.shapes:
        if name not in weights:
            raise InputError(f"{folder}: recipe mismatch: it has no tensor {name}")
        state = None
        if name in manifest["optimizer_steps"]:
            tensors = {key: moments.get(f"{name}.{key}") for key in session.engine.moment_keys(name)}
            state = OptimizerState(manifest["optimizer_steps"][name], tensors)
        session.engine.load(name, weights.get(name), state)
    session.engine.load_extra_state(manifest["extra"])
    extensions = list(manifest.get("extensions", []))  # a key that earlier versions did not write
    return Progress(manifest["step"], manifest["updates"], list(manifest["recent"]), extensions)


def whole_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a valid checkpoint under its own name; raises InputError."""
    manifest = read_manifest(folder)
    if folder.name.startswith("step-") and folder.name != f"step-{manifest['step']:08d}":
        raise InputError(f"{folder}: contains step {manifest['step']}; the folder was renamed or swapped")
    return manifest


def newest(folder: Path, tell: Any = print) -> Path | None:
    """The latest valid checkpoint; invalid ones are reported and skipped."""
    for candidate in reversed(all_checkpoints(folder)):
        try:
            whole_manifest(candidate)
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
    manifest = whole_manifest(folder)
    reader = TensorReader(folder, manifest["weights"])
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


def _keep(folder: Path, newest: int) -> None:
    """Delete all checkpoints except the latest ones and the best one."""
    good = best(folder)
    for old in all_checkpoints(folder)[:-newest]:
        if old != good:
            shutil.rmtree(old, ignore_errors=True)
