"""``strategy.mesh.tensor``: the matrices of layers are divided over ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.layouts import Layout
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.strategies.layouts.context.spec import attention_heads
from toolkit.tasks import task_of

FAMILIES = (
    "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "granite",
    "helium", "llama", "mistral", "nemotron", "olmo", "phi", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
"""Model types whose ``base_model_tp_plan`` (transformers 5.23.0) says of every matrix of a block how it is divided,
and which are verified."""

_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


class Tensor(Layout):
    name = "tensor"
    title = "consecutive ranks that divide the matrices of each layer"
    what = "layers"
    exchange = "add up hidden states in every layer"
    apart: ClassVar = {"expert": "ranks that divide experts have everything else whole"}

    def why_not(self, settings: int, recipe: Recipe, facts: ModelFacts, *device: object) -> str | None:
        """Why ranks could not compute a part of every layer each, and the alternative; or None."""
        model, count, config = recipe.model, settings, facts.config or {}
        if model.trust_remote_code or facts.model_type not in FAMILIES:
            return (
                f"{facts.model_type or 'this model'} has no plan for its layers, or none that is verified; verified "
                f"are {', '.join(FAMILIES)}"
            )
        if task_of(model.task).media is not None:
            return f"has not been verified with model.task: {model.task}"
        if config.get("quantization_config"):
            return "has not been verified with a base that is quantised already"
        if (reason := why_not_in_parts(recipe)) is not None:
            return reason
        for key in _ATTENTION_DROPOUT:
            if facts.value(key):
                return (
                    f"would draw the same dropout mask for the heads of every rank; set {key}: 0 in "
                    "model.config, or in the model's config.json"
                )
        heads = attention_heads(facts)
        if heads is None:
            return "requires the number of attention heads, which the model's config does not say"
        sizes = {
            "attention heads": heads,
            "key heads": facts.value("num_key_value_heads") or heads,
            "columns of the feed-forward layers (intermediate_size)": facts.value("intermediate_size") or count,
        }
        for what, size in sizes.items():
            if size % count:
                return f"{count} ranks cannot divide {size} {what}; set a divisor of {size}"
        return None

    def reason(self, mesh: Mesh) -> str:
        if mesh.tensor == 1:
            return "every layer is computed by one process"
        return (
            f"{mesh.tensor} consecutive ranks each compute a part of every layer's matrices and heads "
            "(arXiv:1909.08053); they train on the same samples. Not in training_args.json: the Trainer reads it from "
            "the model; nor in deepspeed.json, with which another script would give each of them samples of its own"
        )

    def divide(self, model: Any, ranks: Any, source: str) -> Mapping[str, Any]:
        from toolkit.model.tensor import split_layers

        return split_layers(model, ranks, source)


def why_not_in_parts(recipe: Recipe, experts: bool = False) -> str | None:
    """The first option of a recipe that has not been verified where several ranks have a part of each weight
    (`strategy.mesh`), and the alternative; or None. ``experts``: they are what is divided."""
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
    return "has not been verified with run.group_norms; remove it" if recipe.run.group_norms else None
