"""Whether a model's weights are in linear layers, which QLoRA quantises to 4 bits, determined from its source code; and
whether the quantisation package is installed."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from toolkit.recipe.model_facts import ModelFacts, model_sources


def why_not_quantisable(facts: ModelFacts) -> str | None:
    """Why QLoRA would leave most of this model unquantised, or quantise it twice; else None."""
    if facts.config is None:
        return f"needs to read the model's code, but {facts.why_unknown}"
    if facts.config.get("quantization_config"):
        return "quantises the base itself, but the weights of model.path are already quantised; set the original model"
    if (found := kept_elsewhere(facts)) is not None:
        return f"quantises linear layers, but {facts.model_type} stores weights in {found}"
    return None


_DEQUANTISED = ("mxfp4", "fp8")
"""``quant_method`` of checkpoints that transformers dequantises on loading, if asked or without their kernels."""


def why_not_trainable(facts: ModelFacts) -> str | None:
    """Why a checkpoint that is quantised already cannot be trained; None if it is not, or is dequantised on loading."""
    found = (facts.config or {}).get("quantization_config")
    if not isinstance(found, dict):
        return None
    kind = str(found.get("quant_method") or "").lower()
    if kind in _DEQUANTISED:
        return None
    if not kind and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        kind = "bitsandbytes"
    return (
        f"its weights are quantised already ({kind or 'unknown method'}), and packed weights cannot be sharded or "
        "compared with a plain loop; set the original model (adapter.method: qlora quantises it to 4 bits)"
    )


def kept_elsewhere(facts: ModelFacts) -> str | None:
    """What stores weights of the model's blocks other than linear layers, or None."""
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
"""Minimum version of bitsandbytes, with quantisation on a CPU; tested with 0.50.2."""


def why_no_quantiser() -> str | None:
    """What this machine lacks for QLoRA, and what to do, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        lacks = "it is not installed"
    elif Version(found := version("bitsandbytes")) < Version(NEEDS):
        lacks = f"{found} is installed"
    else:
        return None
    return f"needs bitsandbytes {NEEDS} or newer; {lacks}: pip install 'bitsandbytes>={NEEDS}', or use lora"
