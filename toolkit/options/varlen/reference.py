"""The plain loop beside ``model.attention: varlen``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.reference.option import PlainOption


class _Plain(PlainOption):
    def loads(self, resolved: Any) -> Any:
        """On a GPU, where ``varlen`` is a kernel that takes bounds of packed samples: with sdpa, each sample alone."""
        if resolved.device != "cuda":
            return resolved
        model = resolved.recipe.model.model_copy(update={"attention": "sdpa"})
        return replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))


def plain(settings: str) -> PlainOption:
    """Its part of the plain loop."""
    return _Plain()
