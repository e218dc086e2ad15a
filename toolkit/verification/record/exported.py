"""What a checkpoint answers once it is exported and loaded again by transformers and PEFT alone."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import InputError
from toolkit.model.load import input_weight, load_base, switch_off_cache
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels
from toolkit.training import export
from toolkit.training.export_check import exported_adapter, trained_model
from toolkit.verification.cases.samples import RaggedSamples, expected_windows

Answers = dict[str, torch.Tensor]
AVERAGED = "averaged "
"""In front of the names of exported weights, where they are averages."""


@torch.no_grad()
def exported_answers(resolved: Resolved, checkpoint: Path, samples: RaggedSamples, folder: Path) -> Answers:
    """Logits on the first micro-batch: of the trained model, of the same with its input embedding off by one machine
    epsilon (which tells what rounding does to them), and of each export loaded again."""
    recipe = resolved.recipe
    alone = dataclasses.replace(resolved, device="cpu")
    trained: Any = trained_model(alone, checkpoint, samples.pad_id)
    inputs = _inputs(samples, resolved, trained)
    answers = {"trained": trained(**inputs).logits}
    if optimizer_kind(recipe.optimizer.name).averages:
        answers |= {f"{AVERAGED}{n}": p.detach().clone() for n, p in trained.named_parameters() if p.requires_grad}
    rounded = copy.deepcopy(trained)
    input_weight(rounded).mul_(1 + torch.finfo(torch.float32).eps)
    answers["perturbed"] = rounded(**inputs).logits
    if recipe.adapter is None:
        export.write_model(trained, recipe, folder / "whole", merged=False)
        answers["exported"] = _load(trained, folder / "whole", recipe)(**inputs).logits
        return answers
    export.write_model(trained, recipe, folder / "adapter", merged=False)
    fresh = load_base(alone, samples.pad_id)
    linears = {} if resolved.base is None else resolved.base.linears(fresh, resolved)
    adapted = exported_adapter(resolved, folder / "adapter", fresh, linears)
    answers["exported"] = adapted(**inputs).logits
    if not METHODS[recipe.adapter.method].merges:
        return answers
    base = trained.get_base_model()
    names = [name for name, parameter in trained.named_parameters() if parameter.requires_grad]
    try:
        export.check_shared(alone, names)
        export.write_model(trained, recipe, folder / "merged", merged=True)
    except InputError:  # as `toolkit export --merged` says
        return answers
    answers["merged"] = _load(base, folder / "merged", recipe)(**inputs).logits
    return answers


def _load(like: Any, folder: Path, recipe: Any) -> Any:
    attention = recipe.model.attention
    model = type(like).from_pretrained(str(folder), dtype=torch.float32, attn_implementation=attention).eval()
    switch_off_cache(model)  # some make theirs of a config or of layers that not every model of the type has
    return model


def _inputs(samples: RaggedSamples, resolved: Resolved, model: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(expected_windows(samples, resolved, 1)[0][0][1].tensors)
    labels = tensors.pop("labels")
    if task_of(resolved.recipe.model.task).labels is Labels.TARGET:
        tensors["decoder_input_ids"] = labels.clamp(min=0)
    # An exported model has its key-value cache on, with which positions tell no packed samples apart.
    return tensors | {"use_cache": False} if resolved.recipe.data.packing else tensors
