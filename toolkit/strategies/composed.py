"""An engine is made of its strategy's class and of layouts, a class for each axis of the mesh that divides the model.

Layouts (``toolkit/strategies/layouts``) come before the strategy's class among the base classes: each gives and takes
weights of the whole model in place of this process's own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from toolkit.plugins import named


def engine_with(engine: type[Any], layouts: Sequence[str]) -> type[Any]:
    """``engine`` for a model that ``layouts`` divide, each by ``module:class``; itself without one."""
    key: Any = engine  # a class, which mypy does not take for hashable
    return _made(key, tuple(layouts)) if layouts else engine


@functools.cache
def _made(engine: Any, layouts: tuple[str, ...]) -> type[Any]:
    bases = (*map(named, layouts), engine)
    return type("".join(base.__name__ for base in bases), bases, {"__doc__": engine.__doc__})
