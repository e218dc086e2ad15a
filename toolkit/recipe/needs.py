"""What training a recipe needs in addition to a device; plans and launch files do not need it."""

from __future__ import annotations

from pathlib import Path

from toolkit.recipe.model_facts import looks_local
from toolkit.recipe.schema import Recipe

NO_TOKENIZER = "none"
"""``tokenizer.path`` of a recipe whose samples need no tokenizer: `verify` makes its own."""


def why_no_tokenizer(recipe: Recipe) -> str | None:
    """Why a recipe has no tokenizer, and what to do; or None. Plans and launch files need none."""
    if recipe.model.config is not None and recipe.tokenizer.path is None:
        return "a model from model.config has no tokenizer; set one"
    return None


def missing_tokenizer(recipe: Recipe) -> str | None:
    """Why this machine does not have the recipe's tokenizer, as far as names show; or None. Training needs it, `verify`
    does not. Libraries take a folder that is not there for a name on the hub."""
    path = recipe.tokenizer.path
    return f"no folder {path}" if path is not None and looks_local(path) and not Path(path).exists() else None


def cpus_per_node(recipe: Recipe) -> int:
    """Minimum number of cores per node: one for each training process and for each of its data workers (a stream has at
    most one, see TrainLoader)."""
    workers = min(1, recipe.data.workers) if recipe.data.streaming else recipe.data.workers
    return recipe.machine.processes * (1 + workers)
