"""Which parameters decay, which are hidden matrices, and the groups that an optimizer is made of."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.schema import Optimizer


def decayed_names(model: nn.Module, optimizer: Optimizer) -> frozenset[str]:
    """Names of the trainable parameters that weight decay applies to.

    ``matrices``: two dimensions or more and not an embedding, which leaves out norms, biases and a head tied to
    the embedding. Call before sharding: shards have other shapes.
    """
    embeddings = _embeddings(model)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (optimizer.decay == "all" or (parameter.ndim >= 2 and id(parameter) not in embeddings))
    )


def hidden_matrices(model: nn.Module, heads: Iterable[str]) -> frozenset[str]:
    """Names of the trainable 2-D parameters that are neither embeddings nor part of the output head.

    ``heads``: names of modules that a task puts on top of the model. Call before sharding: shards have other shapes.
    """
    others, tops = _embeddings(model) | _output_head(model), set(heads)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and id(parameter) not in others
        and not tops.intersection(name.split("."))
    )


def group_of(optimizer: Optimizer, name: str) -> int | None:
    """The first of the recipe's groups whose pattern is found in the parameter's name; None if there is none."""
    return next((at for at, group in enumerate(optimizer.groups) if re.search(group.match, name)), None)


def check_groups(optimizer: Optimizer, names: Iterable[str], source: str) -> None:
    """Raise InputError for a group that no trainable parameter is in. ``names``: the trainable parameters."""
    names = list(names)
    used = {group_of(optimizer, name) for name in names}
    for at, group in enumerate(optimizer.groups):
        if at in used:
            continue
        some = any(re.search(group.match, name) for name in names)
        why = "every parameter that it matches is in an earlier group" if some else "it matches no trainable parameter"
        raise InputError(
            f"{source}: optimizer.groups[{at}].match: {group.match!r}: {why} (the names are like {names[0]!r}; the "
            "small model of `verify` has fewer layers: use --full-size for a pattern that names a layer)"
        )


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], decayed: frozenset[str], matrices: frozenset[str], optimizer: Optimizer
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, by the recipe's groups, weight decay and, for an optimizer that splits, algorithm.

    Beside torch's keys each has ``names`` (of its parameters), ``group`` (the number of the recipe's group, or None),
    ``lr_factor`` (its rate as a multiple of ``optimizer.lr``) and ``matrix`` (whether they are hidden matrices).
    """
    splits = optimizer_kind(optimizer.name).splits
    found: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in parameters.items():
        at, matrix = group_of(optimizer, name), splits and name in matrices
        own = None if at is None else optimizer.groups[at]
        if own is None or own.weight_decay is None:
            decay = optimizer.weight_decay if name in decayed else 0.0
            decays = name in decayed
        else:
            decay, decays = own.weight_decay, True
        lr = optimizer.lr if own is None or own.lr is None else own.lr
        place = (len(optimizer.groups) if at is None else at, not matrix, not decays)
        group = found.setdefault(
            place,
            {"params": [], "weight_decay": decay, "lr": lr, "lr_factor": lr / optimizer.lr, "names": [],
             "group": at, "matrix": matrix},
        )  # fmt: skip
        group["params"].append(parameter)
        group["names"].append(name)
    return [found[place] for place in sorted(found)]


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    decayed: frozenset[str],
    matrices: frozenset[str],
    optimizer: Optimizer,
    *,
    fused: bool,
    warmup: int = 0,
) -> torch.optim.Optimizer:
    """The recipe's optimizer over ``parameters`` by name. ``fused``: fused kernels may be used. ``warmup``: updates of
    the schedule's warm-up, for an optimizer whose step depends on them."""
    kind = optimizer_kind(optimizer.name)
    module, _, function = kind.build.partition(":")
    groups = parameter_groups(parameters, decayed, matrices, optimizer)
    for group in groups if kind.averages else ():
        group["warmup"] = warmup
    made: torch.optim.Optimizer = getattr(importlib.import_module(module), function)(groups, optimizer, fused=fused)
    return made


def _embeddings(model: nn.Module) -> set[int]:
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }


def _output_head(model: nn.Module) -> set[int]:
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return set()
    return set() if head is None else {id(parameter) for parameter in head.parameters()}
