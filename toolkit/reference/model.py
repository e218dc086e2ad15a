"""The model of the plain loop: loaded, adapted and cast, and nothing more (where the base is packed, its linear weights
are the values that the format holds; options change what they change). Never checkpointed, never wrapped."""

from __future__ import annotations

import functools
import re

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.adapters import add_adapter
from toolkit.model.load import load_base, set_dtypes
from toolkit.model.unreached import freeze, unreached
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import active_options


def plain_model(resolved: Resolved, pad_token_id: int | None = None) -> nn.Module:
    """The recipe's model in training mode on its device, with weights in the dtypes of the recipe's precision."""
    options = [option.plain(settings) for option, settings in active_options(resolved.recipe)]
    model = load_base(functools.reduce(lambda one, option: option.loads(one), options, resolved), pad_token_id)
    if resolved.base is not None:
        resolved.base.plain(resolved.stored).change(model, resolved)
    for option in options:
        option.change(model, resolved)
    if resolved.recipe.adapter is not None:
        model = add_adapter(model, resolved)
    for parameter in _matching(model, resolved.recipe.model.freeze):
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{resolved.source}: model.freeze: the patterns match every trainable parameter: nothing is left"
        )
    idle = unreached(model, resolved)
    set_dtypes(model, resolved.precision.trainable, resolved.precision.frozen)
    freeze(model, idle)
    return model.to(torch.device(resolved.device)).train()


def _matching(model: nn.Module, patterns: list[str]) -> list[nn.Parameter]:
    """Parameters with a name in which a pattern of ``model.freeze`` is found."""
    expressions = [re.compile(pattern) for pattern in patterns]
    return [p for name, p in model.named_parameters() if any(e.search(name) is not None for e in expressions)]


def plain_decayed(model: nn.Module, resolved: Resolved) -> frozenset[str]:
    """Names of the trained weights that decay: ``matrices`` means neither norms nor biases nor embeddings."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if resolved.recipe.optimizer.decay == "all":
        return frozenset(name for name, _ in trained)
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return frozenset(name for name, p in trained if p.dim() > 1 and not any(p is table for table in tables))
