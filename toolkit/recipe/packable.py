"""Whether a model separates packed samples, determined from its source code: nothing is imported or run.

Samples are separated by positions, which restart at 0 with each sample: transformers builds the attention mask from
them. A model separates samples if it passes its positions to the mask functions, has no other connection between tokens
(a recurrence, a convolution), and nothing that counts from the start of a row.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from toolkit.recipe.model_facts import ModelFacts, model_sources
from toolkit.rooms import attentions

_ATTENTIONS = ("sdpa", "eager"), ("flex_attention", "flash_attention_2", "flash_attention_3")
"""Before those that options bring, and after."""
_MASKS = frozenset({"create_causal_mask", "create_sliding_window_causal_mask", "create_masks_for_generate"})
_OTHER_WAYS = ("Lightning", "LinearAttention", "Mamba", "Rwkv", "DeltaNet", "Recurrent")


def why_not_packable(facts: ModelFacts, attention: str) -> str | None:
    """Why packed samples would attend to each other in this model, or None."""
    known = (*_ATTENTIONS[0], *attentions(), *_ATTENTIONS[1])
    if attention not in known:
        return f"model.attention {attention} is not known to separate packed samples; use {' or '.join(known)}"
    if facts.config is None:
        return f"it is not known whether the model separates packed samples: {facts.why_unknown}"
    kind = facts.model_type
    if facts.text.value("alibi"):
        return f"{kind}: its attention bias (alibi) uses distances from the start of a row"
    sources = model_sources(facts)
    if not sources:
        return f"{kind}: it is not a model of transformers, so it is not known whether it separates samples"
    marks: set[str] = set().union(*(_marks(source) for source in sources))
    for mark, reason in (
        ("other", "a recurrence or convolution mixes neighbouring samples, whatever the attention mask"),
        ("chunked", "its chunked attention starts its chunks at the start of a row"),
        ("blind", "its attention mask does not use the positions that separate samples"),
    ):
        if mark in marks:
            return f"{kind}: {reason}"
    return None if "masked" in marks else f"{kind}: its own attention mask does not separate samples"


@cache
def _marks(source: Path) -> frozenset[str]:
    """Features of a modeling file: ``masked`` and ``blind`` calls of mask functions, ``chunked`` masks, ``other``
    connections."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    in_a_dict = any(
        isinstance(key, ast.Constant) and key.value == "position_ids"
        for node in nodes
        if isinstance(node, ast.Dict)
        for key in node.keys
    )
    found = set()
    chosen = {name for node in nodes if isinstance(node, ast.Assign) for name in _mask_names(node)}
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(way in node.name for way in _OTHER_WAYS):
            found.add("other")
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "Conv1d":
            found.add("other")
        elif name == "create_chunked_causal_mask":
            found.add("chunked")
        elif name in _MASKS or name in chosen:
            keywords = {keyword.arg for keyword in node.keywords}
            positions = "position_ids" in keywords or (None in keywords and in_a_dict)
            found.add("masked" if positions else "blind")
    return frozenset(found)


def _mask_names(node: ast.Assign) -> list[str]:
    """``mask_function = create_causal_mask if ... else create_sliding_window_causal_mask``: the name that is set."""
    if any(isinstance(part, ast.Name) and part.id in _MASKS for part in ast.walk(node.value)) and not any(
        isinstance(part, ast.Call) for part in ast.walk(node.value)
    ):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
