"""The checkpoints of a run: the latest valid one, the best one, and which are kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from toolkit.errors import InputError, RunFailed
from toolkit.launch.identity import saved_recipe
from toolkit.model.running_statistics import running_layers, statistics
from toolkit.optim.schedule_free import averaged
from toolkit.optimizers import optimizer_kind
from toolkit.rooms import Option
from toolkit.strategies.engines.pieces import Piece
from toolkit.training.manifest import Damaged, Share, read_manifest
from toolkit.training.tensor_folder import Index, TensorReader, read_index

T = TypeVar("T")


def whole_manifest(folder: Path, share: Share = (0, 1), *, when_read: bool = False) -> dict[str, Any]:
    """The manifest of a valid checkpoint under its own name; raises Damaged. ``share``, ``when_read``: see
    ``read_manifest``."""
    manifest = read_manifest(folder, share=share, when_read=when_read)
    if folder.name.startswith("step-") and folder.name != f"step-{manifest['step']:08d}":
        raise Damaged(f"{folder}: contains step {manifest['step']}; the folder was renamed or swapped")
    return manifest


def newest(folder: Path, say: Any = print) -> Path | None:
    """The latest valid checkpoint; invalid ones are reported and skipped."""
    found = first_valid(reversed(all_checkpoints(folder)), say, whole_manifest)
    return found[0] if found else None


def first_valid(candidates: Iterable[Path], say: Any, use: Callable[[Path], T]) -> tuple[Path, T] | None:
    """The first that ``use`` does not raise Damaged for, with its answer; the others are reported."""
    for candidate in candidates:
        try:
            return candidate, use(candidate)
        except Damaged as error:
            say(f"skipping an invalid checkpoint: {error}")
    return None


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def tensors_of(folder: Path, option: Option | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained weights of a checkpoint, or those that ``option`` kept beside them, one after another; raises
    InputError if it is damaged or has none."""
    names, reader, suffix = trained_tensors(folder, whole_manifest(folder, when_read=True), option)
    for name in names:
        yield name, reader.get(name + suffix)


def trained_tensors(
    folder: Path, manifest: dict[str, Any], option: Option | None = None
) -> tuple[list[str], TensorReader, str]:
    """Names of the trained weights of a checkpoint, the reader that has them, or those that ``option`` kept beside
    them, and what it has behind each name. Raises InputError if the option kept none.

    Of an optimizer that averages the weights itself, they are its averages.
    """
    weights, moments = read_index(folder, manifest)
    files = manifest["files"]
    if option is None:
        optimizer = saved_recipe(folder, manifest).optimizer
        if optimizer_kind(optimizer.name).averages:
            return list(weights), AverageReader(folder, weights, moments, files, optimizer.betas[0]), ""
        return list(weights), TensorReader(folder, weights, files), ""
    assert option.shadow is not None
    if any(f"{name}.{option.name}" not in moments for name in weights):
        without = f"it has no {option.shadow.noun} of the weights: the run had no {option.key}"
        raise InputError(f"{folder}: --{option.name}: {without}")
    return list(weights), TensorReader(folder, moments, files), f".{option.name}"


def read_statistics(model: nn.Module, folder: Path, manifest: dict[str, Any]) -> None:
    """Set every running statistic of ``model`` to a checkpoint's; raises RunFailed if it has none of that name."""
    running = TensorReader(folder, read_index(folder, manifest)[1], manifest["files"])
    for name, value in statistics(running_layers(model)).items():
        if name not in running:
            raise RunFailed(f"{folder}: {name}: the checkpoint has no such running statistic")
        value.copy_(running.get(name))


class AverageReader(TensorReader):
    """Reads the average x of the weights y of a checkpoint, which has z among the moments."""

    def __init__(self, folder: Path, weights: Index, moments: Index, files: dict[str, Any], beta1: float) -> None:
        super().__init__(folder, weights, files)
        self._moments, self._beta1 = TensorReader(folder, moments, files), beta1

    def get(self, name: str, piece: Piece | None = None) -> torch.Tensor:
        weight, z = super().get(name, piece), f"{name}.z"
        if z not in self._moments:  # not updated yet: x, y and z are equal
            return weight
        return averaged(weight, self._moments.get(z, piece), self._beta1)


def best(folder: Path) -> Path | None:
    """The checkpoint that is best by ``run.metric``, the lowest held-out loss by default, of those that were evaluated
    when saved; where the metric has changed, by that of the latest of them."""
    found: dict[Path, float] = {}
    metric: str | None = None
    for candidate in reversed(all_checkpoints(folder)):
        try:
            score = _score(read_manifest(candidate, deep=False))
        except InputError:
            continue
        if score is None or metric not in (None, score["metric"]):
            continue
        metric = score["metric"]
        found[candidate] = -score["value"] if score["larger_is_better"] else score["value"]
    return min(reversed(found), key=found.__getitem__, default=None)


def _score(manifest: dict[str, Any]) -> dict[str, Any] | None:
    """Metric, value and direction of a checkpoint that was evaluated. Earlier versions wrote the loss alone."""
    score = manifest.get("score", {"metric": "eval_loss", "value": manifest["eval_loss"], "larger_is_better": False})
    return None if score is None or score["value"] is None else score


def keep_some(folder: Path, newest: int) -> None:
    """Delete all checkpoints except the latest ones and the best one."""
    good = best(folder)
    for old in all_checkpoints(folder)[:-newest]:
        if old != good:
            shutil.rmtree(old, ignore_errors=True)


def padded_by_its_tokenizer(folder: Path) -> bool:
    """Whether the newest checkpoint of a run is of a version that padded a classifier's rows with whatever token the
    tokenizer's files name: such a run goes on as it began."""
    for checkpoint in reversed(all_checkpoints(folder)):
        try:
            return "pad_token" not in json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # damaged: an earlier one is taken
    return False
