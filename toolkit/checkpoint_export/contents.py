"""What another tool's checkpoint takes over from one of the toolkit's: weights, AdamW's moments, counts, settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.optimizers import optimizer_kind
from toolkit.optimizers.base import ADAM
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.pieces import Shape
from toolkit.training.finding import trained_tensors
from toolkit.training.tensor_folder import TensorReader, read_index


@dataclass(frozen=True)
class Contents:
    """A checkpoint's training state. Tensors are read when they are asked for, whole, in float32."""

    resolved: Resolved
    names: tuple[str, ...]
    """Of what trains, in the order of the model."""
    shapes: dict[str, Shape]
    step: int
    """Steps of the run. ``updates``: those that changed the weights; fp16 may have skipped some."""
    updates: int
    counts: dict[str, int]
    """The optimizer's count by name."""
    groups: list[dict[str, Any]]
    """Each with ``names``, ``lr`` of the next step, ``initial_lr``, ``betas``, ``eps`` and ``weight_decay``."""
    notes: tuple[str, ...]
    _weights: TensorReader
    _moments: TensorReader

    def read(self, name: str, what: str) -> torch.Tensor:
        """``what``: ``fp32`` for the weight, ``exp_avg`` or ``exp_avg_sq``."""
        found = self._weights.get(name) if what == "fp32" else self._moments.get(f"{name}.{what}")
        return found.float()


def read_contents(folder: Path, manifest: dict[str, Any], resolved: Resolved) -> Contents:
    """``resolved``: the checkpoint's recipe for one process. Raises InputError for another optimizer than AdamW, and
    for a weight without moments: no update has been made."""
    optimizer = resolved.recipe.optimizer
    kind = optimizer_kind(optimizer.name)
    if kind.packed or kind.splits or kind.tensors(optimizer, (2, 2), False) != ADAM:
        raise InputError(f"--format: optimizer.name: {optimizer.name}: only the moments of adamw can be exported")
    names, weights, _ = trained_tensors(folder, manifest)
    moments = TensorReader(folder, read_index(folder, manifest)[1], manifest["files"])
    counts = manifest["optimizer_steps"]
    absent = next((n for n in names if n not in counts or any(f"{n}.{key}" not in moments for key in ADAM)), None)
    if absent is not None:
        raise InputError(f"{folder}: {absent} has no moments: no update was made; export without --format")
    shapes = {name: weights.index[name].shape for name in names}
    rate, notes = _rate(resolved, manifest["updates"])
    known = {f"{name}.{key}" for name in names for key in ADAM}
    beside = [name for name in moments.names() if name not in known]
    if beside:
        notes += (f"{len(beside)} tensors are not exported: averages of weights, running statistics ({beside[0]})",)
    return Contents(
        resolved, tuple(names), shapes, manifest["step"], manifest["updates"], {name: counts[name] for name in names},
        _groups(resolved, rate), notes, weights, moments,
    )  # fmt: skip


def _rate(resolved: Resolved, updates: int) -> tuple[float, tuple[str, ...]]:
    """The learning rate of the next step, as a multiple of the largest."""
    from toolkit.training.extension import rates

    recipe = resolved.recipe
    peak = recipe.optimizer.lr * resolved.rate_factor
    if recipe.run.max_steps is None and recipe.schedule.name != "constant":
        return 1.0, ("the learning rate is the largest of the schedule, whose length in steps depends on the data",)
    return rates(recipe, recipe.run.max_steps or updates + 1, resolved.rate_factor)(updates) / peak, ()


def _groups(resolved: Resolved, rate: float) -> list[dict[str, Any]]:
    """The groups that the toolkit makes its optimizer of, in their order."""
    from toolkit.optim.groups import parameter_groups
    from toolkit.training.preparation import prepare_model

    optimizer = resolved.recipe.optimizer
    prepared = prepare_model(resolved, by_part=True)
    found = []
    for group in parameter_groups(prepared.trainable(), prepared.decayed, prepared.matrices, optimizer):
        peak = optimizer.lr * group["lr_factor"] * resolved.rate_factor
        found.append({"names": group["names"], "lr": peak * rate, "initial_lr": peak, "betas": tuple(optimizer.betas),
                      "eps": optimizer.eps, "weight_decay": group["weight_decay"]})  # fmt: skip
    return found
