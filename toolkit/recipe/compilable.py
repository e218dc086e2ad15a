"""Whether a recipe's blocks can be compiled one by one, told without torch; and whether this machine can compile."""

from __future__ import annotations

import importlib.util
import os
import shutil

from toolkit.recipe.schema import Recipe
from toolkit.recipe.traits import Traits


def why_not_compilable(recipe: Recipe, blocks: tuple[str, ...], traits: Traits) -> str | None:
    """The reason why ``compile: true`` cannot be had with this recipe and what can, or None."""
    if not blocks:
        return "compiles a model's blocks, and which modules those are is not known; name their class in strategy.wrap"
    if traits.why_no_compile is not None:
        return traits.why_no_compile
    if recipe.activation_checkpointing == "selective":
        return (
            "chooses itself what a block keeps and what it computes again (the cheap, where that saves memory); set "
            "activation_checkpointing: none to leave it the choice, or full"
        )
    return None


def why_no_compiler(device: str) -> str | None:
    """What this machine lacks to compile for ``device``, or None."""
    compilers = [os.environ.get("CXX") or "g++", "clang++", "c++"] if device == "cpu" else ["gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        return f"needs a compiler here, and there is no {' or '.join(compilers)}; install one"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "needs triton to make kernels for a GPU, and it is not installed; install it"
    return None
