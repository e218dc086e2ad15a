"""Whether Liger's kernels can replace operators of a model (`model.kernels: liger`), determined without torch."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of

PACKAGE = "liger-kernel"
KINDS = ("rms_norm", "layer_norm", "swiglu", "geglu", "rope")
"""Arguments of liger_kernel's functions, one for each model type, that replace a part of a block."""

_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""What the kernel of an MLP computes, whatever the model's config has (liger_kernel 0.8.5, monkey_patch.py)."""


def why_not_liger(recipe: Recipe, facts: ModelFacts) -> str | None:
    """Why ``model.kernels: liger`` is not possible with this recipe, and the alternative; or None. Whether liger_kernel
    knows the model type is checked where it is installed."""
    if recipe.compile:
        return "replaces operators that compiled blocks fuse themselves; set torch, or compile: false"
    if recipe.activation_checkpointing == "selective":
        return (
            "rotates queries and keys in the memory of the products that activation_checkpointing: selective keeps, "
            "so that a recomputed block would rotate them twice; set activation_checkpointing: full or none, or torch"
        )
    mesh = recipe.strategy.mesh
    if mesh is not None and max(mesh.context, mesh.tensor, mesh.pipeline, mesh.expert) > 1:
        return "has not been verified beside strategy.mesh.context, tensor, pipeline and expert; set torch"
    if task_of(recipe.model.task).media is not None:
        # liger_kernel 0.8.5, monkey_patch.py: «nn.LayerNorm = LigerLayerNorm» for Mllama, SigLIP, SmolVLM, InternVL.
        return f"changes torch's own LayerNorm for models of images, as {recipe.model.task} trains; set torch"
    known = liger_arguments()
    if known is None:
        return None
    if facts.config is None:
        return f"needs the model's type, but {facts.why_unknown}; set torch"
    kind = str(facts.model_type)
    if not set(known.get(kind, ())) & set(KINDS):
        return f"has no kernels for model type {kind} in {PACKAGE} {liger_version()}; set torch, or install a newer one"
    if (other := other_activation(facts, known[kind])) is not None:
        return f"{other}; set torch"
    return None


def why_no_liger(device: str) -> str | None:
    """What this machine lacks to run Liger's kernels, or None."""
    if device == "cpu":
        return "its kernels are for GPUs alone, but machine.device is cpu; set machine.device: cuda"
    if _package() is None:
        return f"{PACKAGE} is not installed; pip install {PACKAGE}"
    return None


def other_activation(facts: ModelFacts, arguments: tuple[str, ...]) -> str | None:
    """Where the model's MLP has another activation than the kernel that would replace it; None where it has the same,
    or its config does not say. ``arguments``: of the model type's function, as `liger_arguments` has them."""
    text = facts.text
    found = text.value("hidden_activation") or text.value("hidden_act") or None
    for kind, own in _ACTIVATIONS.items():
        if kind in arguments and found is not None and found not in own:
            return f"computes {own[0]} in MLPs, but this model's activation is {found}"
    return None


def liger_version() -> str:
    """The installed version of liger_kernel."""
    return importlib.metadata.version(PACKAGE)


@functools.cache
def liger_arguments() -> Mapping[str, tuple[str, ...]] | None:
    """Of each model type that the installed liger_kernel knows, the arguments of its function: what it can replace.
    None where it is not installed. Read from its source code, since importing it imports torch."""
    package = _package()
    if package is None:
        return None
    source = package / "transformers" / "monkey_patch.py"
    functions: dict[str, tuple[str, ...]] = {}
    table: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = tuple(argument.arg for argument in node.args.args)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN":
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Name):
                    table[str(key.value)] = functions.get(value.id, ())
    return table


def _package() -> Path | None:
    """The folder of the installed liger_kernel."""
    found = importlib.util.find_spec("liger_kernel")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None
