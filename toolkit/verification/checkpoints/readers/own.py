"""This toolkit's own checkpoints: trained weights and moments, in one format for every strategy."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.errors import InputError
from toolkit.launch.identity import saved_recipe
from toolkit.optim.schedule import learning_rate
from toolkit.recipe.rates import rate_factor
from toolkit.training.manifest import MANIFEST, read_manifest
from toolkit.training.tensor_folder import Index, TensorReader, read_index
from toolkit.verification.checkpoints.contents import MOMENTS, Checkpoint, StoredTensor, Tensors


def is_own(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_own(folder: Path) -> Checkpoint:
    """A folder ``step-N``. Raises InputError if a file differs from the manifest."""
    manifest = read_manifest(folder)
    found = Checkpoint(folder, f"toolkit, {manifest.get('strategy', '?')}", trained_only=True)
    found.step = manifest["updates"]
    weights, moments = read_index(folder, manifest)
    found.weights = _tensors(folder, weights)
    found.order = tuple(weights)
    stored = _tensors(folder, moments)
    for moment in MOMENTS:
        ending = f".{moment}"
        found.moments[moment] = {
            name.removesuffix(ending): one for name, one in stored.items() if name.endswith(ending)
        }
    _add_rates(found, manifest)
    return found


def _tensors(folder: Path, index: Index) -> Tensors:
    reader = TensorReader(folder, index)
    return {name: StoredTensor(one.shape, one.dtype, partial(reader.get, name)) for name, one in index.items()}


def _add_rates(found: Checkpoint, manifest: dict[str, Any]) -> None:
    """The schedule is a function of the recipe; a length in epochs needs the data and is left out."""
    try:
        recipe = saved_recipe(found.path, manifest)
    except InputError as error:
        found.notes.append(f"the learning rate is not known: {error}")
        return
    found.compute = {"bf16": "bfloat16", "bf16-pure": "bfloat16", "fp16": "float16"}.get(recipe.precision, "float32")
    batch = manifest.get("identity", {}).get("global_size") or recipe.optimizer.base_global_batch or 1
    found.peak = recipe.optimizer.lr * rate_factor(recipe.optimizer, batch)
    total, schedule = recipe.run.max_steps, recipe.schedule
    if total is None or found.step is None:
        return
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = math.ceil((schedule.warmup_ratio or 0.0) * total)
    found.learning_rate = (learning_rate(schedule, found.peak, found.step, warmup, total),)
