"""``activation_offload: true``: what checkpointed blocks keep waits in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.rooms import Option


class ActivationOffload(Option):
    name = "activation_offload"
    title = "the inputs of checkpointed blocks wait for their backward in host memory"
    typed_key = "activation_offload"
    off_value = False
    axes = frozenset({"context", "tensor", "expert"})
    claim = ("offloaded", "activations in host memory")
    missing = "activations-not-offloaded"
    seen_by = "store"
    free = True
    host_value = True

    def refusals(self, settings: bool, recipe: Recipe) -> list[str]:
        kind = recipe.activation_checkpointing
        return [] if kind == "full" else [f"{self.key}: requires activation_checkpointing: full (it is {kind})"]

    def why_not(
        self, settings: bool, recipe: Recipe, facts: ModelFacts, blocks: tuple[str, ...], device: str
    ) -> str | None:
        if device != "cpu":
            return None
        return (
            "moves memory from a GPU to the host, but machine.device is cpu, where the model already is in host "
            "memory; set it to false, or machine.device: cuda"
        )

    def why_not_axis(self, axis: str) -> str:
        return f"has not been verified with {self.key}; set it to false"

    def decision(self, settings: bool) -> None:
        return None

    def apply(self, model: Any, settings: bool) -> None:
        """The blocks' forwards, once checkpointed, use the ``store``."""

    def store(self, settings: bool) -> Any:
        return self._needed("apply").HostStore()

    def plain(self, settings: bool) -> Any:
        """Nothing: the plain loop keeps all activations."""
        from toolkit.reference.option import PlainOption

        return PlainOption()

    def engaged(self, ranks: Sequence[Any], resolved: Any, counted: Sequence[bool]) -> list[Any]:
        return list(self._needed("evidence").engaged(ranks, counted))
