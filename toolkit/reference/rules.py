"""What applies to each trained weight: its formula, its weight decay, and its learning rate as a multiple."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from toolkit.recipe.resolve import Resolved
from toolkit.reference.optimizers import formula_for
from toolkit.reference.optimizers.base import Formula
from toolkit.tasks import task_of


@dataclass(frozen=True)
class Rule:
    """``factor``: the weight's learning rate divided by ``optimizer.lr``. ``group``: the number of its group in the
    recipe, or None."""

    formula: Formula
    weight_decay: float
    factor: float = 1.0
    group: int | None = None


def plain_rules(
    settings: Any,
    shapes: Mapping[str, tuple[int, ...]],
    decayed: frozenset[str],
    matrices: frozenset[str],
    warmup: int = 0,
) -> dict[str, Rule]:
    """The rule of each weight. ``settings``: the recipe's section ``optimizer``. ``shapes``: of the trained weights, by
    name. ``decayed``: those that decay unless a group says otherwise. ``matrices``: the hidden matrices. ``warmup``:
    updates of the schedule's warm-up."""
    rules = {}
    for name, shape in shapes.items():
        decay, factor, number = settings.weight_decay if name in decayed else 0.0, 1.0, None
        for at, group in enumerate(getattr(settings, "groups", ())):
            if re.compile(group.match).search(name) is not None:
                number = at
                decay = decay if group.weight_decay is None else group.weight_decay
                factor = 1.0 if group.lr is None else group.lr / settings.lr
                break
        formula = formula_for(settings, tuple(shape), name in matrices).warmed_up(warmup).named(name)
        rules[name] = Rule(formula, decay, factor, number)
    return rules


def plain_matrices(model: nn.Module, resolved: Resolved) -> frozenset[str]:
    """Names of the trained matrices of hidden layers: tables of embeddings are none, nor is what computes the model's
    outputs, tied to such a table or not."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    getter = getattr(model, "get_output_embeddings", None)
    try:
        top = getter() if getter is not None else None
    except NotImplementedError:
        top = None
    tables |= {id(p) for p in top.parameters()} if isinstance(top, nn.Module) else set()
    heads = task_of(resolved.recipe.model.task).heads
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() == 2 and id(p) not in tables and not any(f".{h}." in f".{name}." for h in heads)
    )
