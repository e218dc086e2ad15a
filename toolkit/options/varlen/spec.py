"""Whether attention can be computed sample by sample (`model.attention: varlen`), determined without torch."""

from __future__ import annotations

from typing import Any

from toolkit.machine import compute_capabilities
from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.schema import Recipe
from toolkit.rooms import ATTENTION, Option

VARLEN = "varlen"

NEEDS = (8, 0)
"""Compute capability that torch's kernel requires (torch 2.13.0, flash_attn/flash_api.cpp, ``mha_varlen_fwd``), as it
requires 16 bits and heads of a multiple of 8, of 256 at most."""
_HEAD_MULTIPLE, _LARGEST_HEAD = 8, 256
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


class Varlen(Option):
    name = VARLEN
    title = "attention over packed rows is computed sample by sample"
    typed_key = ATTENTION
    on_value = VARLEN
    off_value = "sdpa"
    claim = None  # `verify` compares packed samples with each alone
    missing = ""
    unmasked = "attention takes the time and memory of rows that are one sample each"

    def why_not(
        self, settings: str, recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], device: str
    ) -> str | None:
        reason = why_not_varlen(recipe, facts, device)
        return None if reason is None else f"{VARLEN} {reason}"

    def why_not_here(self, settings: str, device: str) -> str | None:
        poor = [found for found in compute_capabilities() if found < NEEDS] if device == "cuda" else []
        return f"{VARLEN} {varlen_capability_message(min(poor))}" if poor else None

    def decision(self, settings: str) -> None:
        return None

    def in_float32(self, device: str) -> bool:
        return device != "cuda"

    def remove(self, values: dict[str, Any]) -> None:
        values["model"]["attention"] = self.off_value

    def attention(self, settings: str, resolved: Any, *, traced: bool) -> str:
        if resolved.device != "cuda":
            return str(self._needed("apply").register_varlen(traced=traced))
        if traced:
            return "flash_attention_2"  # saves the same tensors
        return str(self._needed("kernel").register_varlen_on_gpu(resolved.source))

    def apply(self, model: Any, settings: str) -> None:
        """The model is built with it."""


def why_not_varlen(recipe: Recipe, facts: ModelFacts, device: str) -> str | None:
    """Why attention cannot be computed sample by sample with this recipe, and the alternative; or None."""
    mesh = recipe.strategy.mesh
    if not recipe.data.packing:
        return "is for packed rows; set data.packing: true, or model.attention: sdpa"
    if device != "cpu" and (reason := _why_not_on_gpu(recipe, facts.text)):
        return f"{reason}; use sdpa"
    if recipe.compile:
        return "depends on where the samples of a row begin, which a compiled block cannot; use sdpa"
    if mesh is not None and max(mesh.context, mesh.tensor, mesh.pipeline, mesh.expert) > 1:
        return "has not been verified beside mesh.context, tensor, pipeline and expert; use sdpa"
    code = "".join(source.read_text(encoding="utf-8") for source in model_sources(facts))
    if _INTERFACE not in code:
        return f"requires transformers' attention interface, which {facts.model_type} does not use; use sdpa"
    capped = facts.text.value("attn_logit_softcapping") is not None
    for argument, what in (("softcap=", "caps its scores"), ("s_aux=", "has sinks")):
        if argument in code and (capped or argument != "softcap="):
            return f"computes what sdpa does, but the attention of {facts.model_type} {what}; use eager"
    return None


def varlen_capability_message(found: tuple[int, int]) -> str:
    """The message for a GPU without the kernel."""
    return f"needs GPUs of compute capability 8.0 or newer (Ampere), and this one has {found[0]}.{found[1]}; use sdpa"


def _why_not_on_gpu(recipe: Recipe, facts: ModelFacts) -> str | None:
    if recipe.precision == "fp32":
        return "requires 16 bits on a GPU, but precision is fp32; use precision: bf16, or fp16"
    if dropout := next((key for key in _DROPOUTS if facts.value(key)), None):
        return f"has no dropout on a GPU, but this model's {dropout} is {facts.value(dropout)}"
    heads, width = facts.value("num_attention_heads"), facts.hidden_size
    size = facts.value("head_dim") or (width // heads if heads and width else None)
    if isinstance(size, int) and (size % _HEAD_MULTIPLE or size > _LARGEST_HEAD):
        return (
            f"requires heads of a multiple of {_HEAD_MULTIPLE} on a GPU, of {_LARGEST_HEAD} at most; this model's have "
            f"{size}"
        )
    return None
