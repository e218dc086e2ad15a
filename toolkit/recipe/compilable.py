"""Whether a recipe's blocks can be compiled one by one, determined without torch, and whether this machine can
compile."""

from __future__ import annotations

import importlib.util
import os
import shutil

from toolkit.recipe.schema import Recipe
from toolkit.recipe.traits import Traits


def why_not_compilable(recipe: Recipe, blocks: tuple[str, ...], traits: Traits) -> str | None:
    """Why ``compile: true`` is not possible with this recipe, and the alternative; or None."""
    if not blocks:
        return "needs the class of the model's blocks, which is not known; set it in strategy.wrap"
    if traits.why_no_compile is not None:
        return traits.why_no_compile
    if recipe.activation_checkpointing == "selective":
        return (
            "selects itself which activations of a block to keep and which to recompute; set "
            "activation_checkpointing: none (the compiler selects) or full"
        )
    return None


def why_no_compiler(device: str) -> str | None:
    """What this machine lacks to compile for ``device``, or None."""
    compilers = [os.environ.get("CXX") or "g++", "clang++", "c++"] if device == "cpu" else ["gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        return f"needs a C++ compiler; {' or '.join(compilers)} was not found; install one"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "needs triton to generate GPU kernels; install triton"
    return None
