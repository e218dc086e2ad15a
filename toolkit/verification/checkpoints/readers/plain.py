"""Whole tensors: transformers, PEFT, accelerate, FSDP's full state dicts, Lightning, torch.save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.verification.checkpoints.contents import Checkpoint, Tensors
from toolkit.verification.checkpoints.readers.files import load_json, load_safetensors, load_torch, stored
from toolkit.verification.checkpoints.readers.optimizer import add_optimizer, add_schedule, add_step, is_optimizer

WEIGHTS = {
    "adapter_model.safetensors": "PEFT adapter",
    "adapter_model.bin": "PEFT adapter",
    "pytorch_model_fsdp.bin": "FSDP, full state dict",
    "model.safetensors": "safetensors",
    "model.safetensors.index.json": "safetensors, several files",
    "pytorch_model.bin": "pytorch_model.bin",
    "pytorch_model.bin.index.json": "pytorch_model.bin, several files",
}
"""By file name, in the order in which they are looked for."""
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights", "ema")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
_SCHEDULE_KEYS = ("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict")
_STEP_KEYS = ("global_step", "step", "steps", "iteration")


def weights_file(folder: Path) -> str | None:
    """The name of the file of ``folder`` that has a model's or an adapter's weights, if any."""
    return next((name for name in WEIGHTS if (folder / name).is_file()), None)


def read_plain(folder: Path) -> Checkpoint:
    """A folder of `save_pretrained`, the Trainer or `Accelerator.save_state`. Raises InputError."""
    name = weights_file(folder)
    assert name is not None
    found = Checkpoint(folder, WEIGHTS[name])
    file = folder / name
    found.trained_only = name.startswith("adapter_model")
    found.weights = _indexed(file) if name.endswith(".json") else weights_of(file)
    if file.suffix == ".bin":
        found.order = tuple(found.weights)
    optimizer = next((folder / one for one in OPTIMIZERS if (folder / one).is_file()), None)
    if optimizer is None:
        found.notes.append(f"{folder}: no {' or '.join(OPTIMIZERS)}: moments are not compared")
    else:
        document = load_torch(optimizer)
        if not is_optimizer(document):
            raise InputError(
                f"{optimizer}: not the state of an optimizer: it has no state and param_groups; save it again"
            )
        add_optimizer(found, document)
    return found


def weights_of(file: Path) -> Tensors:
    """The tensors of one file by name."""
    return load_safetensors(file) if file.suffix == ".safetensors" else stored(load_torch(file))


def _indexed(index: Path) -> Tensors:
    names = load_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise InputError(f"{index}: it has no weight_map; copy or save it again")
    files: dict[str, Tensors] = {}
    found = {}
    for name, file in names.items():
        if file not in files:
            if not (index.parent / file).is_file():
                raise InputError(f"{index.parent / file}: missing: {index.name} names it; copy every file")
            files[file] = weights_of(index.parent / file)
        if name not in files[file]:
            raise InputError(f"{index.parent / file}: has no {name}, which {index.name} says; save it again")
        found[name] = files[file][name]
    return found


def read_file(file: Path) -> Checkpoint:
    """A single file: weights, or a dictionary with a model's and an optimizer's ``state_dict``. Raises InputError.

    The keys are those of Lightning (``state_dict``, ``optimizer_states``, ``lr_schedulers``, ``global_step``) and of
    PyTorch's tutorials (``model_state_dict``, ``optimizer_state_dict``, ``model``, ``optimizer``).
    """
    if file.suffix == ".safetensors":
        found = Checkpoint(file, "safetensors")
        found.weights = load_safetensors(file)
        found.notes.append(f"{file}: weights only: moments are not compared")
        return found
    document = load_torch(file)
    if not isinstance(document, dict):
        raise InputError(f"{file}: {type(document).__name__}, expected a dictionary of tensors or of state dicts")
    found = Checkpoint(file, "Lightning" if "pytorch-lightning_version" in document else "state dict")
    model = _first(document, _MODEL_KEYS, lambda value: bool(stored(value)))
    found.weights = stored(document if model is None else model)
    if not found.weights:
        raise InputError(f"{file}: no tensors by name; looked for {', '.join(_MODEL_KEYS)}, or tensors at the top")
    found.order = tuple(found.weights)
    optimizer = _first(document, _OPTIMIZER_KEYS, is_optimizer)
    if optimizer is None:
        found.notes.append(f"{file}: no state of an optimizer: moments are not compared")
    else:
        add_optimizer(found, optimizer)
    add_schedule(found, _first(document, _SCHEDULE_KEYS, lambda value: isinstance(value, dict)))
    step = _first(document, _STEP_KEYS, lambda value: isinstance(value, int) and not isinstance(value, bool))
    add_step(found, step)
    return found


def _first(document: dict[str, Any], keys: tuple[str, ...], fits: Callable[[Any], bool]) -> Any:
    """The value of the first key that fits; of a list with one value (Lightning), that value."""
    for key in keys:
        value = document.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if value is not None and not isinstance(value, torch.Tensor) and fits(value):
            return value
    return None
