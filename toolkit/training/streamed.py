"""Exports without the model in memory: its tensors are read, converted and written one after another.

transformers and PEFT themselves, on a model without values, decide what is written under which name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from toolkit.errors import RunFailed
from toolkit.model.load import cast_parameters, load_base
from toolkit.model.sources import NotByPart
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option
from toolkit.training.finding import read_statistics, trained_tensors
from toolkit.training.merge import merged_by_peft
from toolkit.training.preparation import without_values
from toolkit.training.streaming import Source, in_order, sources, write_file, write_model
from toolkit.training.values import Values


@dataclass(frozen=True)
class Job:
    """What is exported from where to where. ``weights_of``: the option whose weights are exported in place of those
    that trained; ``merged``: the adapter into its base."""

    resolved: Resolved
    folder: Path
    manifest: dict[str, Any]
    pad_token_id: int | None
    writing: Path
    weights_of: Option | None = None
    merged: bool = False
    dtype: torch.dtype | None = None
    """Of a model that is written whole or merged; None: as it is in memory."""


def write_in_turn(job: Job) -> str:
    """Write a model, merged or full, or an adapter, one tensor after another; returns the kind. Raises NotByPart where
    that is not possible (``writing`` may have begun), InputError if PEFT cannot merge the adapter."""
    if job.resolved.recipe.adapter is not None:
        return _merged(job) if job.merged else _adapter(job)
    if not _trained_whole(job):
        _with_frozen(job)
    return "full model"


def _trained_whole(job: Job) -> bool:
    """Write a model of which the checkpoint has every tensor; False, and nothing is written, where one is missing:
    frozen weights, those that no output depends on, buffers."""
    trained, reader, suffix = trained_tensors(job.folder, job.manifest, job.weights_of)
    model: Any = load_base(job.resolved, job.pad_token_id, empty=True)
    dtype = job.dtype or getattr(torch, job.resolved.precision.trainable)
    cast_parameters(model, dtype)
    parts = _sources(model)
    if any(part.name not in trained for part in parts):
        return False
    shapes = {part.name: model.get_parameter(part.name).shape for part in parts}
    wrong = next((name for name, shape in shapes.items() if reader.index[name + suffix].shape != shape), None)
    wrong = wrong or next((name for name in trained if name not in shapes), None)
    if wrong is not None:
        raise RunFailed(f"{job.folder}: {wrong}: the model has no tensor of this name and shape")
    name_classes(model, job.manifest)
    model.config.use_cache = True
    write_model(model, parts, lambda name: reader.get(name + suffix).to(dtype), job.writing)
    return True


def _with_frozen(job: Job) -> None:
    model: Any = without_values(job.resolved, job.pad_token_id).model
    values = Values(model, *trained_tensors(job.folder, job.manifest, job.weights_of))
    read_statistics(model, job.folder, job.manifest)
    one_dtype(model, job.dtype)
    name_classes(model, job.manifest)
    model.config.use_cache = True
    _write(model, values, job.writing)


def _adapted(job: Job) -> tuple[Any, Values]:
    """The model with its adapter, whose values are the checkpoint's."""
    for overwritten in (True, False):
        model: Any = without_values(job.resolved, job.pad_token_id, overwritten=overwritten).model
        values = Values(model, *trained_tensors(job.folder, job.manifest, job.weights_of))
        if not values.unknown:  # else some of it may be computed from the base, which is not there
            break
    return model, values


def _merged(job: Job) -> str:
    model, values = _adapted(job)
    name_classes(model, job.manifest)
    base: Any = merged_by_peft(partial(values.merge, model))
    del model
    if job.dtype is not None:
        cast_parameters(base, job.dtype)
    base.config.use_cache = True
    _write(base, values, job.writing)
    return "merged model"


def _write(model: Any, values: Values, folder: Path) -> None:
    write_model(model, _sources(model), lambda name: values.of(model.get_parameter_or_buffer(name)), folder)


def _sources(model: Any) -> list[Source]:
    parts = sources(model)
    if parts is None:
        raise NotByPart("transformers saves several of its tensors as one")
    return parts


def _adapter(job: Job) -> str:
    """PEFT's own ``save_pretrained``; what it saves without values (trained copies of modules, embeddings) is read when
    it is written."""
    import peft
    from peft import get_peft_model_state_dict

    model, values = _adapted(job)
    name_classes(model, job.manifest)
    tensors = model.state_dict()
    names = {id(tensor): name for name, tensor in tensors.items()}
    origins = {key: names.get(id(tensor)) for key, tensor in get_peft_model_state_dict(model, tensors).items()}

    def save(saved: dict[str, torch.Tensor], path: Any, metadata: dict[str, str]) -> None:
        def made(part: Source) -> dict[str, torch.Tensor]:
            tensor, name = part.saved[part.name], origins.get(part.name)
            if not tensor.is_meta:
                return {part.name: tensor}
            if name is None:
                raise NotByPart(f"PEFT makes {part.name} out of several tensors")
            return {part.name: values.of(_named(model, name))}

        write_file(Path(path), in_order([Source(key, {key: tensor}) for key, tensor in saved.items()]), made)

    with mock.patch.object(peft.peft_model, "safe_save_file", save):
        model.save_pretrained(job.writing)
    name_base(job.writing, job.resolved.recipe)
    return "adapter"


def _named(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer of any module."""
    owner, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(owner), attribute)
    return found


def name_classes(model: Any, manifest: dict[str, Any]) -> None:
    """Write the names of a classifier's labels into the model's config."""
    if names := manifest.get("label_names"):  # a key that earlier versions did not write
        own = dict(enumerate(names)) | {at: f"LABEL_{at}" for at in range(len(names), model.config.num_labels)}
        model.config.id2label, model.config.label2id = own, {name: at for at, name in own.items()}


def one_dtype(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """All weights in ``dtype``; without it frozen ones (``model.freeze``) in the dtype of the trained ones, which their
    values fit into."""
    cast_parameters(model, dtype or next(p.dtype for p in model.parameters() if p.requires_grad))


def name_base(folder: Path, recipe: Recipe) -> None:
    """PEFT records the base as the model was loaded; a base made from a bare config has no name to record."""
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = recipe.model.path
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
