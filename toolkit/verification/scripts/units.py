"""Which models of a process are recorded: the outermost ones that transformers and PEFT can build again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def units_of(module: nn.Module) -> list[nn.Module]:
    """The outermost rebuildable models in ``module``; itself, out of its wrappers, where there is none."""
    found: list[nn.Module] = []
    _collect(module, found)
    return found or [_unwrapped(module)]


def owners_of(parameters: Iterable[Any]) -> list[nn.Module]:
    """The outermost modules of this process that have one of ``parameters``, found among all living objects."""
    wanted = {id(p) for p in parameters}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    children = {id(child) for one in modules for child in vars(one).get("_modules", {}).values() if child is not None}
    roots = [one for one in modules if id(one) not in children and "_parameters" in vars(one)]
    return [root for root in roots if any(id(p) in wanted for p in root.parameters())]


def units_holding(parameters: Sequence[Any]) -> list[nn.Module]:
    """The units that have one of ``parameters``."""
    wanted = {id(p) for p in parameters}
    units = [unit for owner in owners_of(parameters) for unit in units_of(owner)]
    held = {id(unit): unit for unit in units if any(id(p) in wanted for p in unit.parameters())}
    return list(held.values())


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    if _rebuildable(module):
        if module not in found:
            found.append(module)
        return
    for child in module.children():
        _collect(child, found)


def _rebuildable(module: nn.Module) -> bool:
    models = sys.modules.get("transformers.modeling_utils")
    if models is not None and isinstance(module, models.PreTrainedModel):
        return True
    adapters = sys.modules.get("peft.peft_model")
    return adapters is not None and isinstance(module, adapters.PeftModel)


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module
