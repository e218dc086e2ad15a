"""AdamW with decay groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from toolkit.recipe.schema import Optimizer


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


def step_count(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: int) -> torch.Tensor:
    """The count of steps for a parameter's state, float32, without dimensions, on the device where the optimizer keeps
    it: fused AdamW on the parameter's, the others on the host. They read it there in every step, so a count on a GPU
    would make the host wait for each parameter."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return torch.tensor(float(steps), device=parameter.device if fused else "cpu")


def _in_8_bits(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    from toolkit.optim.adamw8bit import AdamW8bit  # with torch's DTensor, which a plan need not wait for

    return AdamW8bit(groups, **options)
