"""AdamW with decay groups, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit.recipe.schema import Optimizer, Schedule


def decayed_names(model: nn.Module, optimizer: Optimizer) -> frozenset[str]:
    """Names of the trainable parameters that weight decay applies to.

    ``matrices``: two dimensions or more and not an embedding, which leaves out norms, biases and a head tied to
    the embedding. Call before sharding: shards have other shapes.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (optimizer.decay == "all" or (parameter.ndim >= 2 and id(parameter) not in embeddings))
    )


def make_adamw(
    parameters: Mapping[str, nn.Parameter], decayed: frozenset[str], optimizer: Optimizer, *, fused: bool
) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) over ``parameters`` by name, in a group with and one without decay."""
    with_decay = [parameter for name, parameter in parameters.items() if name in decayed]
    without = [parameter for name, parameter in parameters.items() if name not in decayed]
    groups = [
        {"params": with_decay, "weight_decay": optimizer.weight_decay},
        {"params": without, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (optimizer.betas[0], optimizer.betas[1])
    if optimizer.name == "adamw8bit":
        return _in_8_bits(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)
    return torch.optim.AdamW(
        groups,
        lr=optimizer.lr,
        betas=betas,
        eps=optimizer.eps,
        fused=fused and optimizer.kernel == "fused",
        foreach=True if optimizer.kernel == "foreach" else None,
    )


def _in_8_bits(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    from toolkit.training.adamw8bit import AdamW8bit  # with torch's DTensor, which a plan need not wait for

    return AdamW8bit(groups, **options)


def learning_rate(schedule: Schedule, peak: float, update: int, warmup: int, total: int) -> float:
    """Learning rate of the ``update``-th optimizer update, counted from 0.

    The formulas are those of transformers' ``get_*_schedule_with_warmup``, so that the Trainer run from the
    same recipe has the same: linear from 0 over ``warmup`` updates, then constant, linear to 0 or half a cosine
    to 0 at ``total``.
    """
    if update < warmup:
        return peak * update / max(1, warmup)
    progress = (update - warmup) / max(1, total - warmup)
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            return peak * max(0.0, 1.0 - progress)
        case "cosine":
            return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
