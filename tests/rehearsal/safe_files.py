"""Checkpoint files of fake tensors: zeros in their place, of the same names, shapes and dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rehearsal.fake import outside
from toolkit.training import tensor_folder


def install() -> None:
    """For the rest of this process."""
    save = tensor_folder.save_file

    @outside
    def zeros(tensors: dict[str, torch.Tensor], path: Path, metadata: Any) -> None:
        for name, tensor in tensors.items():
            assert tensor.device.type == "cpu", f"{name} is saved from {tensor.device}"
        save({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in tensors.items()}, path, metadata)

    tensor_folder.save_file = zeros
    tensor_folder.TensorReader.get = outside(tensor_folder.TensorReader.get)  # type: ignore[method-assign]
