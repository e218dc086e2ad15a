"""Names of the pages that commands write without being told where: one for each recipe, strategy and set of overrides,
so that no page takes another's place."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

_LONGEST = 80


def page_name(recipe_file: str, strategy: str | None, words: Sequence[str] = ()) -> str:
    """``zero2-lora-ddp-batch.accumulation-3`` for ``zero2-lora/recipe.yaml strategy.name=ddp batch.accumulation=3``.

    Files that are all called recipe.yaml are named by their folder. ``words``: overrides, and what else tells two calls
    apart.
    """
    file = Path(recipe_file)
    name = file.resolve().parent.name if file.stem == "recipe" else file.stem
    told = [word for word in words if not (strategy and word.startswith("strategy.name="))]
    parts = [name or "recipe", *([strategy] if strategy else []), *told]
    whole = re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.")
    if len(whole) <= _LONGEST:
        return whole
    return f"{whole[: _LONGEST - 7]}-{hashlib.sha256(whole.encode()).hexdigest()[:6]}"
