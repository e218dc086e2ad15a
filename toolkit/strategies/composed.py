"""An engine is made of its strategy's class and of layouts, a class for each axis of the mesh that divides the model.

Layouts (``toolkit/strategies/layouts``) come before the strategy's class among the base classes: each gives and takes
weights of the whole model in place of this process's own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

LAYOUTS = {
    "tensor": "toolkit.strategies.layouts.tensor:Layers",
    "expert": "toolkit.strategies.layouts.expert:Experts",
    "pipeline": "toolkit.strategies.layouts.pipeline:Staged",
}
"""By axis. The axis ``context`` divides rows: engines do nothing otherwise."""


def named(what: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = what.partition(":")
    return getattr(importlib.import_module(module), name)


def engine_with(engine: type[Any], axes: Sequence[str]) -> type[Any]:
    """``engine`` for a model that ``axes`` divide; itself without one."""
    key: Any = engine  # a class, which mypy does not take for hashable
    return _made(key, tuple(axes)) if axes else engine


@functools.cache
def _made(engine: Any, axes: tuple[str, ...]) -> type[Any]:
    bases = (*(named(LAYOUTS[axis]) for axis in axes), engine)
    return type("".join(base.__name__ for base in bases), bases, {"__doc__": engine.__doc__})
