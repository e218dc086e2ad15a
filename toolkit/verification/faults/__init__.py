"""Faults, found by their id: every module beside this one that defines Fault classes, and those of options."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.load import did_you_mean
from toolkit.rooms import all_options
from toolkit.verification.faults.base import Fault, NoFault


def faults() -> dict[str, type[Fault]]:
    """Every fault class by id."""
    return _own() | {fault.id: fault for option in all_options().values() for fault in option.faults()}


@functools.cache
def _own() -> dict[str, type[Fault]]:
    found: dict[str, type[Fault]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        if module in ("base", "mutation"):
            continue
        for member in vars(importlib.import_module(f"{__name__}.{module}")).values():
            if isinstance(member, type) and issubclass(member, Fault) and "id" in vars(member) and member.id != "none":
                found[member.id] = member
    return found


def fault_class(fault_id: str) -> type[Fault]:
    """The fault of that id; raises InputError where there is none."""
    if fault_id not in faults():
        raise InputError(f"--fault: no fault {fault_id!r}{did_you_mean(fault_id, faults())}")
    return faults()[fault_id]


def find_fault(fault_id: str | None, mutation: dict[str, Any] | None = None) -> Fault:
    """What to inject into a run: a fault, a mutation made at random, or nothing."""
    if mutation is not None:
        from toolkit.verification.faults.mutation import Mutation

        return Mutation(**mutation)
    return NoFault() if fault_id is None else fault_class(fault_id)()
