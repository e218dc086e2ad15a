"""Write the matched tensors as a checkpoint of the toolkit's, one tensor after another."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from toolkit.checkpoint_import.match import Matched
from toolkit.errors import RunFailed
from toolkit.launch.identity import identity
from toolkit.recipe.earlier import recipe_version
from toolkit.recipe.resolve import Resolved
from toolkit.results import versions
from toolkit.strategies.engines.pieces import Shape, whole
from toolkit.strategies.engines.prepared import Prepared
from toolkit.training.early_stopping import Improvement
from toolkit.training.sealing import Part, seal
from toolkit.training.tensor_folder import SCHEMA, TensorWriter


def write(matched: Matched, prepared: Prepared, resolved: Resolved, step: int, target: Path) -> None:
    """Write ``target``, a folder ``step-N`` that does not exist; complete, or not at all.

    Weights and moments are in the dtype that the recipe trains in. Memory: one tensor and a file of 1 GiB. Raises
    InputError if a tensor cannot be read, RunFailed if the folder cannot be written.
    """
    writing = target.parent / f".{target.name}.writing"
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        part = _tensors(matched, prepared, step, writing)
        recipe = resolved.recipe.model_dump(mode="json")
        shapes: dict[str, Shape] = {name: tuple(p.shape) for name, p in prepared.trainable().items()}
        keys = {name: tuple(matched.moments[name]) for name in shapes}
        seal(writing, target, recipe, _manifest(matched, resolved, recipe, step), part, shapes, keys, {})
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RunFailed(f"{target}: cannot be written: {reason}; free space there, or set run.output_dir") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
        with contextlib.suppress(OSError):
            target.parent.rmdir()  # only if nothing is in it: no run began


def _tensors(matched: Matched, prepared: Prepared, step: int, writing: Path) -> Part:
    part = Part()
    weights, moments = (TensorWriter(writing, f"{kind}-00000", _now, part.files) for kind in ("weights", "moments"))
    for name, parameter in prepared.trainable().items():
        shape, dtype = tuple(parameter.shape), parameter.dtype
        weights.add(name, shape, [(whole(shape), matched.weights[name].read().to(dtype))])
        for key, moment in matched.moments[name].items():
            moments.add(f"{name}.{key}", shape, [(whole(shape), moment.read().to(dtype))])
        part.steps[name] = step
    weights.flush()
    moments.flush()
    part.weights, part.moments = weights.index, moments.index
    return part


def _now(action: Any, *arguments: Any) -> None:
    action(*arguments)


def _manifest(matched: Matched, resolved: Resolved, recipe: dict[str, Any], step: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "step": step,
        "updates": step,
        "recent": [],
        "extensions": [],
        "improvement": Improvement().to_json(),
        "eval_loss": None,
        "recipe_version": recipe_version(),
        "identity": identity(recipe),
        "strategy": resolved.recipe.strategy.name,
        "world_size": resolved.world_size,
        "versions": versions(),
        "label_names": None,
        "extra": {},
        "imported_from": {"path": str(matched.checkpoint.path), "format": matched.checkpoint.format},
    }
