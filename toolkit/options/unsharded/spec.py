"""``strategy.unsharded_blocks``: frozen weights of the first blocks whole on every process, never gathered."""

from __future__ import annotations

from typing import Any

from toolkit.recipe.strategy_names import REGISTERED
from toolkit.rooms import Option


class Unsharded(Option):
    name = "unsharded"
    title = "frozen weights of the first blocks are whole on every process, never gathered"
    typed_key = "strategy.unsharded_blocks"
    axes = frozenset({"context", "tensor", "pipeline", "expert"})  # refused below, with another message
    claim = ("unsharded-weights", "frozen weights whole on this process")
    missing = "unsharded-not-as-set"
    seen_by = "evidence"
    whole_blocks = True
    not_split = "transformers shards every block"

    def why_not_strategy(self, settings: int, resolved: Any) -> str | None:
        recipe, mesh, traits = resolved.recipe, resolved.mesh, resolved.traits
        if not traits.unshards_frozen:
            can = ", ".join(name for name, other in REGISTERED.items() if other.traits.unshards_frozen)
            return f"{recipe.strategy.name} shards no weights; remove it, or use one of {can}"
        if recipe.adapter is None and not recipe.model.freeze:
            return "all weights train, and only frozen ones can stay whole; remove it"
        if not resolved.blocks:
            return "no block class of this model is known; set strategy.wrap"
        if recipe.strategy.offload == "all":
            return "keeps weights on the device, and offload: all is to keep them off it; remove one of the two"
        for axis, size in {"tensor": mesh.tensor, "pipeline": mesh.pipeline, "expert": mesh.expert}.items():
            if size > 1:
                return (
                    f"is not supported with strategy.mesh.{axis}, which divides the blocks already; remove one of the "
                    "two"
                )
        if mesh.hybrid and traits.hybrid == "weights":
            return (
                "is not supported with a second copy of the weights (strategy.mesh.replicate under "
                f"{recipe.strategy.name}), which keeps them near already; remove one of the two"
            )
        return None

    def decision(self, settings: int) -> tuple[int, str]:
        """accelerate 1.15.0 leaves whole modules out of FSDP, by a regular expression, and DeepSpeed 0.19.8 none: no
        file can say it of frozen weights alone."""
        why = "set by toolkit train; no file has a key for it: other scripts shard and gather these weights too"
        return settings, why

    def fit_twin(self, values: dict[str, Any]) -> None:
        values["strategy"]["unsharded_blocks"] = 1  # a twin has few blocks: one of each kind

    def apply(self, model: Any, settings: int) -> None:
        """The engine leaves them whole."""

    def plain(self, settings: int) -> Any:
        """Nothing: the plain loop shards no weights."""
        from toolkit.reference.option import PlainOption

        return PlainOption()
