"""``strategy.mesh.expert``: the experts of a mixture are divided over ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.layouts import Layout
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.strategies.layouts.tensor.spec import why_not_in_parts

FAMILIES = ("deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
"""Model types whose ``base_model_ep_plan`` (transformers 5.23.0) divides their experts, and which are verified."""

NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call the number of experts."""


class Expert(Layout):
    name = "expert"
    title = "consecutive ranks that divide the experts of each layer, each with samples of its own"
    what = "experts"
    exchange = "exchange tokens in every layer of experts"
    collective = "all-to-all"
    passes = 1
    like = name
    apart: ClassVar = {}  # the others say it
    engine = "toolkit.strategies.layouts.expert.engine:Experts"
    ranks = "toolkit.model.experts:own_expert_ranks"
    acted = "toolkit.planning.parts:acted_experts"

    def why_not(self, settings: int, recipe: Recipe, facts: ModelFacts, *device: object) -> str | None:
        """Why ranks could not have some of the experts each, and the alternative; or None."""
        mesh, model = recipe.strategy.mesh, recipe.model
        assert mesh is not None
        config = facts.config or {}
        if model.trust_remote_code or facts.model_type not in FAMILIES:
            return (
                f"{facts.model_type or 'this model'} has no plan for its experts, or none that is verified; verified "
                f"are {', '.join(FAMILIES)}"
            )
        if config.get("quantization_config"):
            return "has not been verified with a base that is quantised already"
        if recipe.adapter is not None and recipe.adapter.modules_to_save:
            return "has not been verified with adapter.modules_to_save; remove it"
        if (reason := why_not_in_parts(recipe, experts=True)) is not None:
            return reason
        experts = expert_count(facts)
        if experts is None:
            return "requires the number of experts, which the model's config does not say"
        if experts % mesh.expert:
            return f"{mesh.expert} ranks cannot divide {experts} experts; set a divisor of {experts}"
        if (each := experts // mesh.expert) % mesh.shard:
            # A weight is sharded along its first dimension (torch 2.13.0): of two experts each of two ranks has one.
            return (
                f"{mesh.shard} ranks (shard) cannot divide the {each} experts that each has of {experts}; set shard to "
                f"a divisor of {each}, and replicate for the rest, or a smaller expert"
            )
        return None

    def reason(self, mesh: Mesh) -> str:
        if mesh.expert == 1:
            return "every process has all experts"
        return (
            f"{mesh.expert} consecutive ranks each have a part of every layer's experts, to which all of them send "
            "their tokens (arXiv:2006.16668); each trains on samples of its own. Not in accelerate.yaml nor in "
            "training_args.json: other scripts would keep all experts on every device"
        )

    def divide(self, model: Any, ranks: Any, source: str) -> Mapping[str, Any]:
        from toolkit.model.experts import divide_experts

        return divide_experts(model, ranks, source)


def expert_count(facts: ModelFacts) -> int | None:
    """The number of a mixture's experts; None where it is not known."""
    return next((found for key in NUMBERS if isinstance(found := facts.text.value(key), int)), None)
