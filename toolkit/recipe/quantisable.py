"""What bases in 4 bits need: weights in linear layers, determined from the model's source code, or files that have
packed ones, read from its config; an adapter that can wrap them; and the quantisation package."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from toolkit.recipe.adapter_methods import METHODS, adapter_reads_base
from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.schema import Adapter


@dataclass(frozen=True)
class StoredBase:
    """Linear weights that a model's files have in NF4 (bitsandbytes), by its ``quantization_config``.

    ``nested``: their statistics are quantised themselves («double quantisation»). ``left_out``: the names of modules
    that are not packed, transformers' ``llm_int8_skip_modules``; None: those that transformers leaves out by itself.
    """

    nested: bool
    left_out: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return "nf4, doubly quantised" if self.nested else "nf4"


def stored_base(facts: ModelFacts) -> StoredBase | None:
    """How a model's files pack their weights in 4 bits; None if they do not, or in a format that cannot be trained."""
    found = _quantization(facts)
    if _kind(found) != "bitsandbytes" or _why_not_nf4(found) is not None:
        return None
    skipped = found.get("llm_int8_skip_modules")
    return StoredBase(bool(found.get("bnb_4bit_use_double_quant")), None if skipped is None else tuple(skipped))


def why_not_quantisable(facts: ModelFacts) -> str | None:
    """Why QLoRA would leave most of this model unquantised, or quantise it twice; else None."""
    if facts.config is None:
        return f"needs to read the model's code, but {facts.why_unknown}"
    if facts.config.get("quantization_config") and stored_base(facts) is None:
        return "quantises the base itself, but the weights of model.path are already quantised; set the original model"
    if (found := kept_elsewhere(facts)) is not None:
        return f"quantises linear layers, but {facts.model_type} stores weights in {found}"
    return None


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
    found = _quantization(facts)
    if not found or (kind := _kind(found)) in _DEQUANTISED:
        return None
    if kind == "bitsandbytes":
        if (reason := _why_not_nf4(found)) is not None:
            return f"its weights are quantised already (bitsandbytes, {reason}), {_NF4}"
        where = kept_elsewhere(facts)
        return None if where is None else f"{facts.model_type} stores weights in {where}, {_NF4}"
    why = _PACKED_BY.get(kind, "a format that the toolkit does not read")
    return (
        f"its weights are quantised already ({kind or 'unknown method'}): {why}, which cannot be sharded or compared "
        f"with a plain loop; {_ORIGINAL}"
    )


_ORIGINAL = "set the original model (adapter.method: qlora quantises it to 4 bits)"
_NF4 = f"and of bitsandbytes' formats only linear layers in nf4 are trained on; {_ORIGINAL}"
_PACKED_BY = {
    "gptq": "integers in the layout of gptqmodel's kernels",
    "awq": "integers in the layout of gptqmodel's kernels",
    "torchao": "tensors of classes of torchao's own",
}
"""What the weights of other formats are; transformers 5.23.0 reads both GPTQ and AWQ with gptqmodel (quantizer_gptq.py,
quantizer_awq.py)."""


def _quantization(facts: ModelFacts) -> dict[str, Any]:
    found = (facts.config or {}).get("quantization_config")
    return found if isinstance(found, dict) else {}


def _kind(found: dict[str, Any]) -> str:
    kind = str(found.get("quant_method") or "").lower()
    if kind.startswith("bitsandbytes") or (not kind and (found.get("load_in_4bit") or found.get("load_in_8bit"))):
        return "bitsandbytes"
    return kind


def _why_not_nf4(found: dict[str, Any]) -> str | None:
    """The format, if it is another than NF4. What a config does not say is transformers' default, fp4."""
    if not found.get("load_in_4bit"):
        return "8 bits"
    kind = found.get("bnb_4bit_quant_type") or "fp4"
    return None if kind == "nf4" else str(kind)


def why_not_on_packed(adapter: Adapter | None, path: bool) -> str | None:
    """Why a base that is packed in 4 bits already cannot be trained so: the key, and what is wrong with it; or None.
    ``path``: the base is ``model.path``, else ``model.config``."""
    where = f"model.{'path' if path else 'config'}"
    if adapter is None:
        return (
            f"{where}: its weights are packed in 4 bits and cannot be trained; set an adapter, for example method: lora"
        )
    if not METHODS[adapter.method].packed:
        others = ", ".join(name for name, method in METHODS.items() if method.packed and name != "qlora")
        return (
            f"adapter.method: {adapter.method} reads the weights of the layers that it adapts, which {where} has "
            f"packed in 4 bits; use one of {others}"
        )
    if adapter_reads_base(adapter):
        return (
            f"adapter.options.init_lora_weights: {adapter.options['init_lora_weights']} starts from values of the base "
            f"weights, which {where} has packed in 4 bits; use gaussian, or leave it out"
        )
    if adapter.options.get("target_parameters"):
        return (
            f"adapter.options.target_parameters: adapts weights themselves, which {where} has packed in 4 bits; use "
            "adapter.target_modules"
        )
    return None


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


def no_quantiser(stored: StoredBase | None) -> str | None:
    """The key of a base in 4 bits, what this machine lacks for it, and what to do, or None."""
    if (reason := why_no_quantiser()) is None:
        return None
    return f"adapter.method: qlora {reason}, or use lora" if stored is None else f"model: a base in 4 bits {reason}"


def why_no_quantiser() -> str | None:
    """What this machine lacks for weights in 4 bits, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        lacks = "it is not installed"
    elif Version(found := version("bitsandbytes")) < Version(NEEDS):
        lacks = f"{found} is installed"
    else:
        return None
    return f"needs bitsandbytes {NEEDS} or newer; {lacks}: pip install 'bitsandbytes>={NEEDS}'"
