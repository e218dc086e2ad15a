"""What a run of a recipe needs beside a device: plans and launch files are made without it."""

from __future__ import annotations

from toolkit.recipe.schema import Recipe


def why_no_tokenizer(recipe: Recipe) -> str | None:
    """What a recipe that is to be trained lacks of a tokenizer, and what to do, or None. A plan and launch files need
    none."""
    if recipe.model.config is not None and recipe.tokenizer.path is None:
        return "model.config has no tokenizer of its own; name one"
    return None


def cpus_per_node(recipe: Recipe) -> int:
    """Cores that a node needs at least: one for each training process and for each of its data workers (a stream has
    at most one, see TrainLoader)."""
    workers = min(1, recipe.data.workers) if recipe.data.streaming else recipe.data.workers
    return recipe.machine.processes * (1 + workers)
