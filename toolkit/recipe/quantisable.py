"""Quantised weights of a model's files, read from its config, and where a model keeps its weights, determined from its
source code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.base_formats import base_formats
from toolkit.recipe.model_facts import ModelFacts, model_sources

_DEQUANTISED = ("mxfp4", "fp8")
"""``quant_method`` of checkpoints that transformers dequantises on loading, if asked or without their kernels."""


def why_not_trainable(facts: ModelFacts) -> str | None:
    """Why a model cannot be trained: its weights are quantised already and are not dequantised on loading, or no run of
    it can be repeated. None if it can."""
    if facts.config is not None and facts.value("attention_type") == "block_sparse":
        # modeling_big_bird.py seeds numpy with the layer's number, and not at all where that is 0 (transformers 5.23.0)
        return (
            "attention_type block_sparse draws the blocks of its first layer from numpy's own generator, so that no "
            "run can be repeated; set attention_type: original_full in the model's config"
        )
    found = quantization(facts)
    if not found or (kind := quant_method(found)) in _DEQUANTISED:
        return None
    if (reader := next((base for base in base_formats() if base.quant_method == kind), None)) is not None:
        return reader.why_not_read(facts)
    why = _PACKED_BY.get(kind, "a format that the toolkit does not read")
    return (
        f"its weights are quantised already ({kind or 'unknown method'}): {why}, which cannot be sharded or compared "
        f"with a plain loop; {ORIGINAL}"
    )


ORIGINAL = "set the original model (adapter.method: qlora quantises it to 4 bits)"
_PACKED_BY = {
    "gptq": "integers in the layout of gptqmodel's kernels",
    "awq": "integers in the layout of gptqmodel's kernels",
    "torchao": "tensors of classes of torchao's own",
}
"""What the weights of other formats are; transformers 5.23.0 reads both GPTQ and AWQ with gptqmodel (quantizer_gptq.py,
quantizer_awq.py)."""


def quantization(facts: ModelFacts) -> dict[str, Any]:
    """The ``quantization_config`` of a model; empty where it has none."""
    found = (facts.config or {}).get("quantization_config")
    return found if isinstance(found, dict) else {}


def quant_method(found: dict[str, Any]) -> str:
    """The method of a ``quantization_config``, also where it is in terms of bitsandbytes' first versions."""
    kind = str(found.get("quant_method") or "").lower()
    if kind.startswith("bitsandbytes") or (not kind and (found.get("load_in_4bit") or found.get("load_in_8bit"))):
        return "bitsandbytes"
    return kind


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
