"""Checkpoint files of fake tensors: zeros in their place, of the same names, shapes and dtypes; and this rank's part of
them where a checkpoint waits for every rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rehearsal.fake import outside
from toolkit.strategies.engines.pieces import whole
from toolkit.training import checkpoint, tensor_folder
from toolkit.training.sealing import join_parts, seal
from toolkit.training.tensor_folder import Entry


def install() -> None:
    """For the rest of this process."""
    write = tensor_folder.write_tensors

    @outside
    def zeros(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        for name, tensor in tensors.items():
            assert tensor.device.type == "cpu", f"{name} is saved from {tensor.device}"
        return write(path, {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()})

    @outside
    def get(reader: Any, name: str, piece: Any = None) -> torch.Tensor:
        entry = reader.index[name]
        return torch.zeros(entry.shape if piece is None else piece.size, dtype=entry.dtype)

    tensor_folder.write_tensors = zeros
    tensor_folder.TensorReader.get = get  # type: ignore[method-assign]
    checkpoint._seal = _seal_alone


def _seal_alone(
    writing: Path,
    target: Path,
    recipe: Any,
    manifest: Any,
    world: int,
    ending: Any,
    shapes: Any,
    keys: Any,
    beside: Any,
) -> None:
    """Rank 0's part taken for all ranks' parts."""
    part = join_parts(writing, 1, ending)
    kept = next(iter(part.weights.values())).dtype
    part.weights = {name: Entry(shape, kept, [("", whole(shape))]) for name, shape in shapes.items()}
    if part.steps:
        part.steps = dict.fromkeys(shapes, max(part.steps.values()))
    for name, shape in shapes.items():
        for key in keys[name]:
            seen = part.moments.get(f"{name}.{key}", Entry(shape, kept))
            seen.pieces = [("", whole(seen.shape))]
            part.moments[f"{name}.{key}"] = seen
    for name, shape in beside.items():
        part.moments[name].pieces = [("", whole(shape))]
    seal(writing, target, recipe, manifest, part, shapes, keys, beside)
