"""DeepSpeed's universal checkpoints: what `ds_to_universal.py` makes of the partitions of ZeRO 1 to 3.

``zero/NAME/fp32.pt``, ``exp_avg.pt`` and ``exp_avg_sq.pt`` are one tensor each: under its shape (ZeRO 1 and 2), or
flat with the padding of the partitions behind it (ZeRO-3). Shapes, frozen weights and buffers are in the model's
states, which the script copies (deepspeed 0.19.8).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, StoredTensor
from toolkit.verification.checkpoints.readers.files import load_torch, stored
from toolkit.verification.checkpoints.readers.optimizer import add_rates, add_schedule, add_step
from toolkit.verification.checkpoints.readers.zero import CLASSES, compute_dtype, frozen_weights, models_by_rank

_WEIGHT, _STATE = "fp32.pt", "optimizer_state.pt"
_MODEL = "*mp_rank_00_model_states.pt"


def is_universal(folder: Path) -> bool:
    """Whether `ds_to_universal.py` wrote ``folder`` (``global_step100_universal``)."""
    return (folder / "zero" / _STATE).is_file() and any(folder.glob(_MODEL))


def read_universal(folder: Path) -> Checkpoint:
    """Raises InputError if a tensor's file is missing or cannot be read."""
    models = models_by_rank(folder)
    file = models[min(models)]
    model = load_torch(file, CLASSES)
    if not isinstance(model, dict) or not isinstance(model.get("param_shapes"), (list, tuple)):
        raise InputError(f"{file}: not a model state of DeepSpeed's ZeRO: it has no key param_shapes")
    found = Checkpoint(folder, "DeepSpeed, universal")
    add_step(found, (model.get("global_steps") or 0) - (model.get("skipped_steps") or 0))
    add_schedule(found, model.get("lr_scheduler"))
    found.compute = compute_dtype(model.get("ds_config") or {})
    found.order = tuple(model.get("module") or ())
    shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
    tied = set(model.get("shared_params") or ())
    for name, shape in shapes.items():
        if name in tied:
            continue
        found.weights[name] = _tensor(folder, name, _WEIGHT, shape)
        for moment in MOMENTS:
            found.moments[moment][name] = _tensor(folder, name, f"{moment}.pt", shape)
    # ZeRO-3 leaves each rank's part in the states of the model, whose files are by rank then.
    split = len(models) > 1
    found.weights |= frozen_weights(folder, models, model, split, len(models))
    buffers = set(model.get("buffer_names") or ())
    found.weights |= {name: one for name, one in stored(model.get("module")).items() if name in buffers}
    state = load_torch(folder / "zero" / _STATE, CLASSES)
    add_rates(found, [group for group in state.get("param_groups", ()) if isinstance(group, dict)])
    return found


def _tensor(folder: Path, name: str, file: str, shape: tuple[int, ...]) -> StoredTensor:
    path = folder / "zero" / name / file
    if not path.is_file():
        raise InputError(f"{path}: missing; copy the whole folder, or convert the checkpoint again")

    def read() -> torch.Tensor:
        saved = load_torch(path, CLASSES)
        tensor = saved.get("param") if isinstance(saved, dict) else saved
        if not isinstance(tensor, torch.Tensor) or tensor.numel() < math.prod(shape):
            raise InputError(f"{path}: not a tensor of {list(shape)}; convert the checkpoint again")
        return tensor.reshape(-1)[: math.prod(shape)].view(shape)

    return StoredTensor(shape, torch.float32, read)
