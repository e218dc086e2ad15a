"""Checkpoints: whole tensors by name, the same whatever strategy wrote them, so that any other can resume.

A folder is written beside its final name, sealed with a manifest, then renamed: it is whole or not there. Dropout
and the order of the data are functions of the step, so no random state needs saving.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError, NotSo
from toolkit.results import versions
from toolkit.strategies.engines.base import MOMENTS, OptimizerState
from toolkit.training.loop import Progress
from toolkit.training.session import Session
from toolkit.training.tensor_folder import TensorReader, TensorWriter, read_manifest, write_manifest

SCHEMA = "toolkit.checkpoint/1"


def save(session: Session, folder: Path, progress: Progress) -> Path:
    """Write ``folder/step-N``; every rank calls it. Rank 0 writes, one whole tensor in memory after another.

    Raises NotSo where a trained tensor comes back empty or of another shape: nothing empty is ever saved.
    """
    engine, main = session.engine, session.accelerator.is_main_process
    target = folder / f"step-{progress.step:08d}"
    writing = folder / f".{target.name}.writing"
    weights = TensorWriter(writing, "weights")
    moments = TensorWriter(writing, "moments")
    if main:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    steps: dict[str, int] = {}
    for name, shape in engine.shapes.items():
        weight, state = engine.full_weight(name), engine.full_state(name)
        if tuple(weight.shape) != shape or weight.numel() == 0:
            raise NotSo(f"{name}: has shape {tuple(weight.shape)} where {shape} is trained; nothing was saved")
        if main:
            weights.add(name, weight)
        if main and state is not None:
            steps[name] = state.step
            for key in MOMENTS:
                moments.add(f"{name}.{key}", state.moments[key])
    if main:
        weights.flush()
        moments.flush()
        recipe = session.resolved.recipe.model_dump(mode="json")
        (writing / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
        write_manifest(
            writing,
            {
                "schema": SCHEMA,
                "step": progress.step,
                "updates": progress.updates,
                "identity": identity(recipe),
                "strategy": session.resolved.recipe.strategy.name,
                "world_size": session.resolved.world_size,
                "versions": versions(),
                "weights": weights.index,
                "moments": moments.index,
                "optimizer_steps": steps,
                "extra": engine.extra_state(),
            },
        )
        shutil.rmtree(target, ignore_errors=True)
        os.replace(writing, target)
        _keep_newest(folder, session.resolved.recipe.run.keep)
    session.accelerator.wait_for_everyone()
    return target


def load(session: Session, folder: Path) -> Progress:
    """Take weights, moments and progress from a checkpoint; every rank calls it.

    Raises InputError where it is damaged or of another recipe.
    """
    manifest = read_manifest(folder)
    check_identity(folder, manifest, session.resolved.recipe.model_dump(mode="json"))
    weights = TensorReader(folder, manifest["weights"])
    moments = TensorReader(folder, manifest["moments"])
    for name in session.engine.shapes:
        if name not in weights:
            raise InputError(f"{folder}: holds no tensor {name}; was it written by another recipe?")
        state = None
        if name in manifest["optimizer_steps"]:
            tensors = {key: moments.get(f"{name}.{key}") for key in MOMENTS}
            state = OptimizerState(manifest["optimizer_steps"][name], tensors)
        session.engine.load(name, weights.get(name), state)
    session.engine.load_extra_state(manifest["extra"])
    return Progress(manifest["step"], manifest["updates"])


def newest(folder: Path, tell: Any = print) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are told and passed over."""
    for candidate in reversed(all_checkpoints(folder)):
        try:
            read_manifest(candidate)
        except InputError as error:
            tell(f"passed over: {error}")
            continue
        return candidate
    return None


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained weights of a checkpoint, one after another; raises InputError where it is damaged."""
    manifest = read_manifest(folder)
    reader = TensorReader(folder, manifest["weights"])
    for name in reader.names():
        yield name, reader.get(name)


# What may differ between a run and the one that goes on with it: how the work is spread and told, not what it is.
_FREE = {
    "strategy": None,
    "machine": None,
    "run": {"output_dir", "log_every", "save_every", "keep", "eval_every", "trackers"},
    "data": {"workers", "eval"},
    "batch": {"micro_size", "accumulation", "global_size"},
    "activation_checkpointing": None,
}


def identity(recipe: dict[str, Any]) -> dict[str, Any]:
    """The part of a recipe that a resumed run must share, the size of the global batch included."""
    kept: dict[str, Any] = {}
    for section, value in recipe.items():
        free = _FREE.get(section, set())
        if free is None:
            continue
        kept[section] = {k: v for k, v in value.items() if k not in free} if isinstance(value, dict) else value
    batch, machine = recipe["batch"], recipe["machine"]
    ranks = machine["processes"] * machine["nodes"]
    product = (batch["micro_size"] or 1) * (batch["accumulation"] or 1) * ranks
    kept["global_size"] = batch["global_size"] or product
    return kept


def check_identity(folder: Path, manifest: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Raise InputError that names what a checkpoint's recipe and this one do not share."""
    if manifest.get("schema") != SCHEMA:
        raise InputError(f"{folder}: written as {manifest.get('schema')}, this version reads {SCHEMA}")
    differences = [*_differences(manifest["identity"], identity(recipe))]
    if differences:
        raise InputError(f"{folder}: of another recipe; it differs in {', '.join(differences)}")


def _differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from _differences(old.get(key), new.get(key), f"{at}.{key}" if at else key)
    elif old != new:
        yield f"{at} ({old!r} there, {new!r} here)"


def _keep_newest(folder: Path, keep: int) -> None:
    for old in all_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
