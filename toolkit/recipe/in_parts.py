"""Options that have not been verified where several ranks have a part of each weight (`strategy.mesh`)."""

from __future__ import annotations

from typing import Any

from toolkit.optimizers import optimizer_kind
from toolkit.recipe.schema import Recipe


def why_not_in_parts(recipe: Recipe, experts: bool = False) -> str | None:
    """The first such option of a recipe, and the alternative; or None. ``experts``: they are what is divided."""
    adapter, optimizer = recipe.adapter, recipe.optimizer
    if recipe.precision == "fp16":
        return "has not been verified with fp16, whose overflow one rank alone may see; use bf16"
    if recipe.compile:
        return "has not been verified with compiled blocks; set compile: false"
    if adapter is not None and adapter.method != "lora":
        return f"has been verified with adapter.method: lora alone (it is {adapter.method})"
    if adapter is not None and adapter.options.get("target_parameters") and not experts:
        return "has been verified with adapters on linear layers alone; remove adapter.options.target_parameters"
    if not optimizer_kind(optimizer.name).elementwise:
        return f"optimizer.name: {optimizer.name} needs whole matrices; use adamw, lion or sgd"
    if recipe.strategy.offload != "none":
        return "has not been verified with strategy.offload; set offload: none"
    unverified: dict[str, Any] = {"run.ema": recipe.run.ema, "run.group_norms": recipe.run.group_norms}
    for key, given in unverified.items():
        if given:
            return f"has not been verified with {key}; remove it"
    return None
