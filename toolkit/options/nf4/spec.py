"""Bases in NF4, ``adapter.method: qlora`` or files of bitsandbytes: which models, files and adapters can have them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from toolkit.base_formats import BaseFormat
from toolkit.recipe import quantisable
from toolkit.recipe.adapter_methods import METHODS, adapter_reads_base
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe

NEEDS = "0.50"
"""Minimum version of bitsandbytes, with quantisation on a CPU; tested with 0.50.2."""


@dataclass(frozen=True)
class Stored:
    """Linear weights that a model's files have in NF4 (bitsandbytes), by its ``quantization_config``.

    ``nested``: their statistics are quantised themselves («double quantisation»). ``left_out``: the names of modules
    that are not packed, transformers' ``llm_int8_skip_modules``; None: those that transformers leaves out by itself.
    """

    nested: bool
    left_out: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return "nf4, doubly quantised" if self.nested else "nf4"


class Nf4(BaseFormat):
    name = "nf4"
    title = "the linear weights of a frozen base are kept in 4 bits"
    method = "qlora"
    quant_method = "bitsandbytes"
    claim = ("nf4-weights", "base weights in NF4")
    compared_claims = ("nf4-bits",)
    missing = "base-not-quantised"
    packages = {"bitsandbytes": "4-bit and 8-bit base models (QLoRA)"}  # noqa: RUF012

    def stored(self, facts: ModelFacts) -> Stored | None:
        found = quantisable.quantization(facts)
        if quantisable.quant_method(found) != self.quant_method or _other_format(found) is not None:
            return None
        skipped = found.get("llm_int8_skip_modules")
        return Stored(bool(found.get("bnb_4bit_use_double_quant")), None if skipped is None else tuple(skipped))

    def why_not(
        self, stored: Stored | None, recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], device: str
    ) -> str | None:
        """Why QLoRA would leave most of this model unquantised, or quantise it twice."""
        if recipe.adapter is None or recipe.adapter.method != self.method:
            return None
        reason = None
        if facts.config is None:
            reason = f"needs to read the model's code, but {facts.why_unknown}"
        elif facts.config.get("quantization_config") and stored is None:
            reason = (
                "quantises the base itself, but the weights of model.path are already quantised; set the original model"
            )
        elif (found := quantisable.kept_elsewhere(facts)) is not None:
            reason = f"quantises linear layers, but {facts.model_type} stores weights in {found}"
        return None if reason is None else f"{self.method} {reason}; use lora"

    def why_not_read(self, facts: ModelFacts) -> str | None:
        only = f"and of bitsandbytes' formats only linear layers in nf4 are trained on; {quantisable.ORIGINAL}"
        if (other := _other_format(quantisable.quantization(facts))) is not None:
            return f"its weights are quantised already (bitsandbytes, {other}), {only}"
        where = quantisable.kept_elsewhere(facts)
        return None if where is None else f"{facts.model_type} stores weights in {where}, {only}"

    def why_not_stored(self, recipe: Recipe) -> str | None:
        where, adapter = f"model.{'path' if recipe.model.path is not None else 'config'}", recipe.adapter
        if adapter is None:
            return (
                f"{where}: its weights are packed in 4 bits and cannot be trained; set an adapter, for example method: "
                "lora"
            )
        if not METHODS[adapter.method].packed:
            others = ", ".join(name for name, method in METHODS.items() if method.packed and name != self.method)
            return (
                f"adapter.method: {adapter.method} reads the weights of the layers that it adapts, which {where} has "
                f"packed in 4 bits; use one of {others}"
            )
        if adapter_reads_base(adapter):
            return (
                f"adapter.options.init_lora_weights: {adapter.options['init_lora_weights']} starts from values of the "
                f"base weights, which {where} has packed in 4 bits; use gaussian, or leave it out"
            )
        if adapter.options.get("target_parameters"):
            return (
                f"adapter.options.target_parameters: adapts weights themselves, which {where} has packed in 4 bits; "
                "use adapter.target_modules"
            )
        return None

    def why_not_here(self, stored: Stored | None, device: str) -> str | None:
        return no_quantiser(stored)

    def decision(self, stored: Stored | None) -> tuple[str, str]:
        return str(stored or Stored(nested=True)), "not in training_args.json: use BitsAndBytesConfig"

    def card(self, stored: Stored | None) -> str:
        return f"NF4, {'double quantisation, ' if stored is None or stored.nested else ''}blocks of 64"


def _other_format(found: dict[str, Any]) -> str | None:
    """The format, if it is another than NF4. What a config does not say is transformers' default, fp4."""
    if not found.get("load_in_4bit"):
        return "8 bits"
    kind = found.get("bnb_4bit_quant_type") or "fp4"
    return None if kind == "nf4" else str(kind)


def no_quantiser(stored: Stored | None) -> str | None:
    """The key of a base in 4 bits, what this machine lacks for it, and what to do, or None."""
    if importlib.util.find_spec("bitsandbytes") is None:
        lacks = "it is not installed"
    elif Version(found := version("bitsandbytes")) < Version(NEEDS):
        lacks = f"{found} is installed"
    else:
        return None
    reason = f"needs bitsandbytes {NEEDS} or newer; {lacks}: pip install 'bitsandbytes>={NEEDS}'"
    return f"adapter.method: qlora {reason}, or use lora" if stored is None else f"model: a base in 4 bits {reason}"
