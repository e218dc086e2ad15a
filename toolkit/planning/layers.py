"""A model's config with another number of layers: what it lists layer by layer follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BY_LAYER = ("no_rope_layers", "layer_rope_theta", "num_key_value_heads_per_layer", "num_attention_heads_per_layer")
"""Lists of numbers with one entry a layer (transformers 5.23). Lists of names (``layer_types``, ``mlp_layer_types``,
``layers_block_type``) have one where they are as long as the model."""
_NUMBERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "attn_layer_indices", "cross_attention_layers")
"""Lists of layers' numbers."""


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """``config`` with ``num_hidden_layers`` of ``layers`` and the same pattern of layers, cut off or repeated."""
    before = int(config["num_hidden_layers"])
    changed = dict(config) | {"num_hidden_layers": layers}
    for key, value in config.items():
        if not isinstance(value, list) or not value:
            continue
        if key in _NUMBERS:
            inside = repeated([at in value for at in range(before)], layers)
            changed[key] = [at for at, found in enumerate(inside) if found]
        elif len(value) == before and (key in _BY_LAYER or all(isinstance(one, str) for one in value)):
            changed[key] = repeated(value, layers)
    return changed


def repeated(kinds: Sequence[Any], count: int) -> list[Any]:
    """``count`` entries that continue ``kinds``: by the shortest pattern that they repeat, behind a first part of at
    most half of them which does not (a dense layer in front of experts); otherwise all of them again."""
    first, period = _pattern(kinds)
    return [kinds[at if at < first else first + (at - first) % period] for at in range(count)]


def _pattern(kinds: Sequence[Any]) -> tuple[int, int]:
    total = len(kinds)
    for size in range(1, total):
        for period in range(size, 0, -1):
            first = size - period
            if 2 * first > total or first + 2 * period > total:
                continue
            if all(kinds[at] == kinds[at - period] for at in range(first + period, total)):
                return first, period
    return 0, total
