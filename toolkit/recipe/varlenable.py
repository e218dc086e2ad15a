"""Whether attention can be computed sample by sample (`model.attention: varlen`), determined without torch."""

from __future__ import annotations

from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.recipe.schema import Recipe

VARLEN = "varlen"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def why_not_varlen(recipe: Recipe, facts: ModelFacts, device: str) -> str | None:
    """Why attention cannot be computed sample by sample with this recipe, and the alternative; or None."""
    mesh = recipe.strategy.mesh
    if not recipe.data.packing:
        return "is for packed rows; set data.packing: true, or model.attention: sdpa"
    if device != "cpu":
        return "is for machines without a GPU; use flash_attention_2, flex_attention or sdpa"
    if recipe.compile:
        return "depends on where the samples of a row begin, which a compiled block cannot; use sdpa"
    if mesh is not None and max(mesh.context, mesh.tensor, mesh.pipeline, mesh.expert) > 1:
        return "has not been verified beside mesh.context, tensor, pipeline and expert; use sdpa"
    code = "".join(source.read_text(encoding="utf-8") for source in model_sources(facts))
    if _INTERFACE not in code:
        return f"requires transformers' attention interface, which {facts.model_type} does not use; use sdpa"
    capped = (facts.config or {}).get("attn_logit_softcapping", "by default") is not None
    for argument, what in (("softcap=", "caps its scores"), ("s_aux=", "has sinks")):
        if argument in code and (capped or argument != "softcap="):
            return f"computes what sdpa does, but the attention of {facts.model_type} {what}; use eager"
    return None
