"""The model of the plain loop: loaded, adapted and cast, and nothing more (under QLoRA its linear
weights are the values that 4 bits hold; options change what they change). Never checkpointed, never
wrapped."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.adapters import add_adapter
from toolkit.model.load import load_base, set_dtypes
from toolkit.model.nf4 import BLOCK, NESTED, base_linears, packed_nf4, packed_weight
from toolkit.model.unreached import freeze, unreached
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import active_options


def plain_model(resolved: Resolved, pad_token_id: int | None = None) -> nn.Module:
    """The recipe's model in training mode on its device, with weights in the dtypes of the recipe's precision."""
    options = [option.plain(settings) for option, settings in active_options(resolved.recipe)]
    model = load_base(functools.reduce(lambda one, option: option.loads(one), options, resolved), pad_token_id)
    if resolved.base_storage is not None:
        dequantised_base(model, resolved)
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


NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
       0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
"""NormalFloat4, arXiv:2305.14314, appendix E."""


def dequantised_base(model: nn.Module, resolved: Resolved) -> None:
    """Give the base's linear layers the values that their weights have in 4 bits, in place; the layers stay plain."""
    for linear in base_linears(model, resolved).values():
        packed, statistics = packed_weight(linear) or packed_nf4(linear.weight.detach(), torch.uint8)
        linear.weight.data = nf4_values(packed, statistics, linear.weight)


def nf4_values(packed: torch.Tensor, statistics: Any, like: torch.Tensor) -> torch.Tensor:
    """The values of 4-bit weights, from the definition: code times the largest size in its block of 64; with double
    quantisation those sizes, less their mean, are 8-bit codes of a table times the largest in their block of 256
    (section 3). In float32, then in the dtype of ``like``."""
    pairs = packed.view(torch.uint8).flatten().long()
    codes = torch.stack([pairs >> 4, pairs & 15], dim=1).flatten()[: like.numel()]
    sizes = statistics.absmax
    if statistics.state2 is not None:
        codes_of_sizes = statistics.state2.code[sizes.long()]
        sizes = codes_of_sizes * statistics.state2.absmax.repeat_interleave(NESTED)[: sizes.numel()] + statistics.offset
    values = torch.tensor(NF4)[codes] * sizes.repeat_interleave(BLOCK)[: codes.numel()]
    return values.view(like.shape).to(like.dtype)
