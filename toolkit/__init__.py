"""One recipe, every strategy: fine-tuning runs proven equal to a plain PyTorch loop.

>>> from toolkit import load_recipe, verify
>>> verify(load_recipe("recipe.yaml")).verdict
'equivalent'

Names are imported when they are first used, so ``import toolkit`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.api import (
        bench,
        compare_checkpoints,
        export,
        import_checkpoint,
        import_config,
        inspect_data,
        lint,
        migrate,
        plan,
        prove,
        record,
        train,
        verify,
    )
    from toolkit.errors import InputError, RunFailed, Stopped, ToolkitError
    from toolkit.launch.command import write_config
    from toolkit.recipe.load import load_recipe
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve
    from toolkit.verification.loops.recorder import Recorder

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "Recipe",
    "Recorder",
    "RunFailed",
    "Stopped",
    "ToolkitError",
    "bench",
    "compare_checkpoints",
    "export",
    "import_checkpoint",
    "import_config",
    "inspect_data",
    "lint",
    "load_recipe",
    "migrate",
    "plan",
    "prove",
    "record",
    "resolve",
    "train",
    "verify",
    "write_config",
]

_ELSEWHERE = {
    "InputError": "toolkit.errors",
    "Recipe": "toolkit.recipe.schema",
    "Recorder": "toolkit.verification.loops.recorder",
    "RunFailed": "toolkit.errors",
    "Stopped": "toolkit.errors",
    "ToolkitError": "toolkit.errors",
    "load_recipe": "toolkit.recipe.load",
    "resolve": "toolkit.strategies",
    "write_config": "toolkit.launch.command",
}
"""The modules of names that are not in ``toolkit.api``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, "toolkit.api")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
