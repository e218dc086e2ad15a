"""Whether a model's weights stand in linear layers, which QLoRA puts into 4 bits, read from the source of its code; and
whether what packs them is installed here."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from toolkit.recipe.model_facts import ModelFacts, model_sources


def why_not_quantisable(facts: ModelFacts) -> str | None:
    """The reason why QLoRA would leave the bulk of this model as it is, or quantise it twice; None elsewhere."""
    if facts.config is None:
        return f"needs to see the model's code, and {facts.why_unknown}"
    if facts.config.get("quantization_config"):
        return "quantises by itself, and model.path holds quantised weights: name the model that they were made of"
    if (found := kept_elsewhere(facts)) is not None:
        return f"puts linear layers into 4 bits, and {facts.model_type} keeps weights in {found}"
    return None


def kept_elsewhere(facts: ModelFacts) -> str | None:
    """What holds weights of the model's blocks that are no linear layers, or None."""
    return next((found for source in model_sources(facts) if (found := _elsewhere(source)) is not None), None)


@cache
def _elsewhere(source: Path) -> str | None:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Conv1D":
            return "Conv1D layers"
        if isinstance(node, ast.ClassDef) and node.name.endswith("Experts") and _has_parameters(node):
            return f"{node.name}, all experts in one tensor"
    return None


def _has_parameters(node: ast.ClassDef) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "Parameter" for part in ast.walk(node))


NEEDS = "0.50"
"""Of bitsandbytes, which packs and unpacks on a CPU too; 0.50.2 was used."""


def why_no_quantiser() -> str | None:
    """What this machine lacks for QLoRA, and what to do, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        lacks = "it is not installed"
    elif Version(found := version("bitsandbytes")) < Version(NEEDS):
        lacks = f"{found} is installed"
    else:
        return None
    return f"needs bitsandbytes {NEEDS} or newer, and {lacks}: pip install 'bitsandbytes>={NEEDS}', or take lora"
