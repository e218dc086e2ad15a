"""Frozen weights that every process keeps whole, beside what a strategy shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.packed_layers import packed_weights
from toolkit.model.sources import fill, set_values, source_of
from toolkit.recipe.resolve import Resolved
from toolkit.rooms import asked_whole, check_whole
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.prepared import Prepared


def kept_whole(prepared: Prepared) -> dict[str, nn.Parameter]:
    """The frozen weights of the model's first blocks, as many as an option of the recipe names, by name.

    Raises InputError if there are fewer blocks, or if all weights of these train.
    """
    resolved = prepared.resolved
    if (asked := asked_whole(resolved.recipe)) is None:
        return {}
    check_whole(resolved, len(prepared.blocks))
    count = asked.settings
    inside = {id(p) for _, block in prepared.blocks[:count] for p in block.parameters() if not p.requires_grad}
    found = {name: p for name, p in prepared.model.named_parameters() if id(p) in inside}
    if not found:
        where = f"{resolved.source}: {asked.option.key}"
        raise InputError(f"{where}: all weights of the first {count} blocks train, none can stay whole; remove it")
    return found


def load_whole(parameters: Mapping[str, nn.Parameter], prepared: Prepared, device: torch.device) -> None:
    """Move these weights to ``device``, in the dtype that a strategy would gather them in; read those that have a
    source."""
    precision = prepared.resolved.precision
    packed = packed_weights(prepared.model)
    for parameter in parameters.values():
        cast = precision.mixed and parameter.is_floating_point() and id(parameter) not in packed
        dtype = getattr(torch, precision.compute) if cast else parameter.dtype
        if (source := source_of(parameter)) is None:
            parameter.data = parameter.data.to(device, dtype)
            continue
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        fill(values.view(-1), source, 0)
        set_values(parameter, values.to(dtype))


def whole_claims(resolved: Resolved, kept: Mapping[str, int], whole: Mapping[str, int]) -> list[Claim]:
    """Evidence that exactly the ``kept`` weights are ``whole`` on this process: elements by name. Nothing where the
    recipe asks for none."""
    asked = asked_whole(resolved.recipe)
    if asked is None or asked.option.claim is None:
        return []
    right = dict(kept) == dict(whole)
    seen = f"{sum(whole.values()):,}" + ("" if right or sum(whole.values()) != sum(kept.values()) else ", of others")
    return [Claim(*asked.option.claim, f"{sum(kept.values()):,}", seen, right)]
