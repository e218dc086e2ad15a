"""The step of each optimizer as a formula, in float64: what `verify` compares every strategy with."""

from __future__ import annotations

import importlib
from typing import Any

from toolkit.optimizers import optimizer_kind
from toolkit.reference.optimizers.base import Formula


def formula_for(settings: Any, shape: tuple[int, ...], matrix: bool) -> Formula:
    """The formula of one weight. ``settings``: the recipe's section ``optimizer``. ``matrix``: a hidden matrix."""
    kind = optimizer_kind(getattr(settings, "name", "adamw"))
    module, _, name = (kind.formula if isinstance(kind.formula, str) else kind.formula(settings)).partition(":")
    made: Formula = getattr(importlib.import_module(module), name).of(settings, shape, matrix)
    return made
