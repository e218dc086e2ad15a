"""Whether Liger's kernels can replace operators of a model (`model.kernels: liger`), determined without torch."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option
from toolkit.tasks import task_of

PACKAGE = "liger-kernel"
KINDS = ("rms_norm", "layer_norm", "swiglu", "geglu", "rope")
"""Arguments of liger_kernel's functions, one for each model type, that replace a part of a block."""

_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""What the kernel of an MLP computes, whatever the model's config has (liger_kernel 0.8.5, monkey_patch.py)."""


class Liger(Option):
    name = "liger"
    title = "norms, gated MLPs and rotary embeddings are computed by the kernels of liger_kernel"
    typed_key = "model.kernels"
    off_value = "torch"
    axes = frozenset({"context", "tensor", "pipeline", "expert"})  # refused below, with another message
    claim = ("liger-kernels", "operators of liger_kernel")
    missing = "liger-kernels-missing"
    seen_by = "evidence"
    before_adapters = True
    fuses = True
    reorders = "Liger's kernels may compute in another order"
    needs_gpu = "model.kernels: liger: verified with torch's operators, since Liger's kernels need a GPU"
    packages: ClassVar = {PACKAGE: "model.kernels: liger"}
    # What is counted are torch's operators; these keep other tensors for the backward.
    unmeasured = "norms, MLPs and rotary embeddings from liger_kernel"

    def why_not(
        self, settings: str, recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], device: str
    ) -> str | None:
        reason = _why_not(recipe, facts)
        return None if reason is None else f"liger {reason}"

    def why_not_here(self, settings: str, device: str) -> str | None:
        reason = why_no_liger(device)
        return None if reason is None else f"liger: {reason}, or set torch"

    def decision(self, settings: str) -> tuple[str, str]:
        why = "norms, gated MLPs and rotary embeddings of liger_kernel; in training_args.json as use_liger_kernel"
        return settings, why

    def training_args(self, settings: str) -> dict[str, Any]:
        return {"use_liger_kernel": True}

    def trainer_arguments(self, settings: str, resolved: Any) -> dict[str, Any]:
        # Without these two the Trainer replaces the loss as well, of Granite for the whole process.
        fused = resolved.loss_kernel == "liger"
        kernels = {"fused_linear_cross_entropy": fused, "cross_entropy": False}
        return self.training_args(settings) | {"liger_kernel_config": kernels}

    def evidence(self, model: Any, prepared: Any) -> list[Any]:
        return [self._needed("evidence").kernel_claim(model, prepared)]

    def plain(self, settings: str) -> Any:
        """Nothing: the plain loop has torch's operators."""
        from toolkit.reference.option import PlainOption

        return PlainOption()


def _why_not(recipe: Recipe, facts: ModelFacts) -> str | None:
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
    if mesh is not None and mesh.axes:
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
