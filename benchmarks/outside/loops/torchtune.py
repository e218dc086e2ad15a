"""torchtune's recipes: a head in eight chunks, whose cross entropy copies one at a time to float32.

Read from torchtune 0.6.1: recipes/full_finetune_single_device.py, full_finetune_distributed.py and lora_finetune_*.py
(``_loss_step``, ``_setup_model``), modules/loss/ce_chunked_output_loss.py, modules/transformer.py (``chunked_output``).
All weights, adapters, gradients and moments have the dtype of the recipe, without autocast; FSDP2 shards each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.outside.loops.decoder import Decoder
from benchmarks.outside.loops.litgpt_model import Lora
from toolkit.errors import InputError
from toolkit.model.loss_terms import LossTerms
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Adapter

CHUNKS = 8
"""``num_output_chunks``."""
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def chunked_loss(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    own: Any = model
    hidden = model(tensors["input_ids"])
    logits = [own.output(part) for part in hidden.tensor_split(CHUNKS, dim=1)]
    del hidden
    labels = functional.pad(tensors["labels"][:, 1:], (0, 1)).chunk(CHUNKS, dim=1)
    total = torch.zeros((), dtype=torch.float32)
    for part, wanted in zip(logits, labels, strict=True):
        flat = part.reshape(-1, part.shape[-1])
        total = total + functional.cross_entropy(flat.float(), wanted.reshape(-1), reduction="sum")
    return total


def build_model(resolved: Resolved) -> nn.Module:
    """The recipe's model as torchtune builds it, on the meta device, with its adapters. Raises InputError."""
    from toolkit.model.load import build_config

    with torch.device("meta"):
        model = Decoder(build_config(resolved), tune=True)
        if resolved.recipe.adapter is not None:
            _adapt(model, resolved.recipe.adapter)
    return model


def _adapt(model: Decoder, adapter: Adapter) -> None:
    targets = adapter.target_modules
    named = (
        _LAYERS if targets is None or targets == "all-linear" else [targets] if isinstance(targets, str) else targets
    )
    if other := set(named) - {*_LAYERS, "lm_head"}:
        raise InputError(f"--loop torchtune: adapter.target_modules: {min(other)}: torchtune has no switch for it")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if (name in named or (name == "output" and "lm_head" in named)) and isinstance(child, nn.Linear):
                setattr(owner, name, Lora(child, adapter.r or 0, adapter.dropout or 0.0))
