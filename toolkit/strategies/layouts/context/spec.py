"""``strategy.mesh.context``: the tokens of a row are divided over ranks. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.layouts import Layout
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.packable import why_not_packable
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


class Context(Layout):
    name = "context"
    title = "consecutive ranks that divide the tokens of each row"
    what = "rows"
    exchange = "exchange keys and values in every layer"
    collective = "all-to-all"
    moved = "exchanged"
    passes = 1
    like = engine = ""
    apart: ClassVar = {"expert": "ranks that divide experts have whole rows"}

    def why_not(self, settings: int, recipe: Recipe, facts: ModelFacts, *device: object) -> str | None:
        """Why parts of a row on several ranks would not compute what the whole row does."""
        mesh, model = recipe.strategy.mesh, recipe.model
        assert mesh is not None
        task = task_of(model.task)
        if task.labels is not Labels.NEXT or task.media is not None:
            return f"divides the rows of model.task: causal-lm (it is {task.name})"
        if model.attention != "sdpa":
            return f"requires model.attention: sdpa (it is {model.attention})"
        if recipe.compile:
            return "has not been verified with compiled blocks; set compile: false"
        if recipe.adapter is not None and METHODS[recipe.adapter.method].prompt is not None:
            return f"would put the virtual tokens of {recipe.adapter.method} in front of every part of a row; use lora"
        if (reason := why_not_packable(facts, model.attention)) is not None:
            return f"requires a model whose tokens meet in attention alone: {reason}"
        if (kind := _length_dependent(facts.text.config or {})) is not None:
            return (
                f"would choose the rotary frequencies of each part by its own last position, not by the row's "
                f"(rope_type {kind}); remove strategy.mesh.context"
            )
        if facts.text.value("output_router_logits"):
            return (
                "would balance the experts of each part of a row apart; set output_router_logits: false in model.config"
            )
        heads = attention_heads(facts.text)
        if heads is None:
            return "requires the number of attention heads, which the model's config does not say"
        if heads % (mesh.context * mesh.tensor):
            own = heads // mesh.tensor
            each = "" if mesh.tensor == 1 else f" of each of {mesh.tensor} parts of a layer (tensor)"
            return f"{mesh.context} ranks cannot divide {own} attention heads{each}; set a divisor of {own}"
        return None

    def reason(self, mesh: Mesh) -> str:
        if mesh.context == 1:
            return "every row's tokens are computed by one process"
        apart = "consecutive ranks" if mesh.tensor == 1 else f"ranks that are {mesh.tensor} apart"
        return (
            f"{mesh.context} {apart} each compute a part of every row's tokens, and in attention all tokens "
            "of a part of the heads (Ulysses, arXiv:2309.14509); they train on the same samples. Not in "
            "training_args.json: the Trainer would give each of them samples of its own"
        )

    def spread(self, prepared: Any) -> None:
        from toolkit.model.context import divide_rows

        divide_rows(prepared.model, prepared.resolved)


def _length_dependent(config: dict[str, Any]) -> str | None:
    """The kind of rotary embedding whose frequencies depend on the largest position of a forward (transformers 5.23.0,
    ``dynamic_rope_update``); None without. One for the model, or one for each kind of layer; older names too."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for one in (given, *(value for value in given.values() if isinstance(value, dict))):
        kind = str(one.get("rope_type", one.get("type", "")))
        if "dynamic" in kind or kind == "longrope":
            return kind
    return None


def attention_heads(facts: ModelFacts) -> int | None:
    """Attention heads, under any of their config names; None if neither the config nor its class says them."""
    for key in ("num_attention_heads", "n_head", "n_heads", "num_heads"):
        if isinstance(found := facts.value(key), int):
            return found
    return None
