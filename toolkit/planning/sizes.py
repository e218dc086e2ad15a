"""Whether a model's config says what a plan needs: its sizes.

transformers gives a config without sizes those of its class, so that a plan would be of another model. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved

_WIDTH = ("hidden", "embd", "embed", "d_model", "dim", "width", "channel")
_DEPTH = ("layer", "depth", "block", "stage")
"""Parts of the names that families have for the width of a block and for the number of blocks."""
_OTHER = ("layer", "head", "inner", "ffn", "act", "drop")
"""... of names that have a part of a width's and are none: ``num_hidden_layers``, ``head_dim``, ``hidden_act``."""


def check_sizes(resolved: Resolved) -> None:
    """Raise InputError for a config that names no width or no number of layers."""
    config = resolved.facts.config
    if config is None:
        return  # reported when the model is built
    names = [key for key, value in _entries(config) if _is_size(value)]
    widths = [key for key in names if any(part in key for part in _WIDTH) and not any(part in key for part in _OTHER)]
    depths = [key for key in names if any(part in key for part in _DEPTH)]
    for found, what in ((widths, "width (hidden_size)"), (depths, "number of layers (num_hidden_layers)")):
        if not found:
            raise InputError(f"{resolved.source}: model.config: it has no {what}; use the model's own config.json")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value)
        else:
            yield str(key), value


def _is_size(value: Any) -> bool:
    return isinstance(value, int | list) and not isinstance(value, bool) and bool(value)
