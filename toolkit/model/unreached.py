"""Weights that no output of a model depends on: they would get no gradient.

Models of images have them: a mask token of another task, the layers of a vision tower behind the one whose output is
taken (LLaVA takes the last but one), a pooling head. So have encoder-decoders whose embeddings are not tied: BART keeps
the table that both sides would have shared. So has an adapter on a layer whose weight the model reads past the layer.
DDP would end the run, ZeRO would let them decay.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from toolkit.errors import InputError, first_line
from toolkit.model.sources import stand_in
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.tasks.base import Task


def can_have_unreached(model: nn.Module, resolved: Resolved) -> bool:
    """Whether ``unreached`` runs the model. Every other model of text uses all it has, and a forward takes time."""
    config: Any = model.config
    untied = config.is_encoder_decoder and not getattr(config, "tie_word_embeddings", True)
    # Jamba's scan multiplies by this layer's weight itself (transformers 5.23.0): its adapter is never called.
    adapted = resolved.recipe.adapter is not None
    scan = adapted and any(".dt_proj." in name for name, p in model.named_parameters() if p.requires_grad)
    return untied or scan or task_of(resolved.recipe.model.task).media is not None


def unreached(model: nn.Module, resolved: Resolved) -> list[str]:
    """Names of trainable weights that the output for one random sample does not depend on.

    Only where ``can_have_unreached``. The forward runs on the CPU, and no backward: what the output depends on
    is read off its graph. Raises InputError if the model's own forward does not accept such a sample.
    """
    if not can_have_unreached(model, resolved):
        return []
    task, config = task_of(resolved.recipe.model.task), cast(Any, model.config)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in _sample(model, task, config).items()}
    model.eval()
    # An adapter is float32 over a base in 16 bits, and no strategy has cast either yet.
    asked = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Of a model that is loaded by part there are no values: which weights an output depends on needs none.
    without = {name: stand_in(p) for name, p in model.named_parameters() if p.is_meta}
    leaves = asked | {name: without[name].requires_grad_() for name in asked.keys() & without.keys()}
    whole: Any = model
    base = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    experts = _experts_one_by_one(base) if without else contextlib.nullcontext()
    mixed = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with torch.enable_grad(), mixed, experts:
        try:
            output = torch.func.functional_call(model, without, (), inputs)
        except Exception as error:  # whatever a model's own code raises
            kind = type(base).__name__
            message = f"{resolved.source}: model: the forward of {kind} fails on one small sample: {first_line(error)}"
            raise InputError(f"{message}; check the sizes in its config") from error
    model.train()
    reached = _leaves(output.logits)
    return [name for name in asked if id(leaves[name]) not in reached]


@contextlib.contextmanager
def _experts_one_by_one(model: Any) -> Iterator[None]:
    """The grouped product of transformers' experts refuses weights whose elements share memory (torch 2.13.0:
    «Invalid strides/sizes»), as stand-ins' do."""
    if not isinstance(getattr(model.config, "_experts_implementation", None), str):
        yield
        return
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def freeze(model: nn.Module, names: list[str]) -> None:
    """Do not train these; they keep the dtype of what trains, since the model still computes with them."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def _sample(model: nn.Module, task: Task, config: Any) -> dict[str, torch.Tensor]:
    if task.media is None:
        end = config.eos_token_id  # classifiers of encoder-decoders read the state at the last one
        sample = torch.tensor([[5, 6, 7 if end is None else end]])
        found = {"input_ids": sample, "attention_mask": torch.ones_like(sample)}
        if config.is_encoder_decoder:
            found["decoder_input_ids"] = torch.tensor([[config.decoder_start_token_id, 5, 6]])
        return found
    values = config.to_dict()
    found = {name: torch.from_numpy(one) for name, one in task.media.draw(values, random.Random(0)).items()}
    if task.media.in_text is not None:
        from toolkit.data.media import kinds_of_config, token_kinds

        framed = task.media.in_text(values, 1)
        image, ids = max(set(framed), key=framed.count), [5, *framed, 6, 7]
        found |= {
            name: torch.from_numpy(one)
            for name, one in token_kinds(kinds_of_config(task, config), [image], ids).items()
        }
        found |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    elif config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.tensor([[config.decoder_start_token_id, 5, 6]])
    return found


def _leaves(output: torch.Tensor) -> set[int]:
    """Ids of the tensors that gradients of ``output`` would be accumulated in."""
    seen: set[Any] = set()
    found: set[int] = set()
    left = [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        left += [following for following, _ in node.next_functions]
    return found
