"""``strategy.mesh.pipeline``: the blocks of a model are divided over ranks. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.layouts import Layout
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.model_facts import ModelFacts
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import REGISTERED
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.recipe.traits import Traits
from toolkit.strategies.layouts.expert.spec import FAMILIES as MIXTURES

FAMILIES = (
    "apertus", "arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
    "gpt_oss", "granite", "helium", "llama", "mistral", "mixtral", "olmo", "qwen2", "qwen3", "qwen3_moe", "seed_oss",
    "smollm3", "starcoder2",
)  # fmt: skip
"""Model types whose ``base_model_pp_plan`` (transformers 5.23.0) has embeddings, blocks and a norm, and which are
verified."""


class Pipeline(Layout):
    name = "pipeline"
    title = "stages of consecutive blocks, through which micro-batches pass"
    what = "blocks"
    exchange = ""
    passes = 0  # a plan counts by stage what neighbours send (toolkit/planning/stages.py)
    like = name
    apart: ClassVar = {
        "tensor": "a stage has its layers whole",
        "expert": "a stage has all experts of its blocks",
        "context": "a stage passes whole rows on",
    }
    engine = "toolkit.strategies.layouts.pipeline.engine:Staged"

    def why_not(self, settings: int, recipe: Recipe, facts: ModelFacts, *device: object) -> str | None:
        """Why ranks could not compute some of the model's blocks each, and the alternative; or None."""
        model, config = recipe.model, facts.config or {}
        if model.task != "causal-lm":
            return f"requires model.task: causal-lm (it is {model.task})"
        if model.trust_remote_code or facts.model_type not in FAMILIES:
            return (
                f"{facts.model_type or 'this model'} has no plan for its stages, or none that is verified; verified "
                f"are {', '.join(FAMILIES)}"
            )
        if config.get("quantization_config"):
            return "has not been verified with a base that is quantised already"
        if facts.value("output_router_logits"):
            return "would balance the experts of each stage apart; set output_router_logits: false in model.config"
        named = recipe.adapter is not None and recipe.adapter.options.get("target_parameters")
        if named and facts.model_type not in MIXTURES:
            return (
                "has been verified with adapters on layers and experts alone; remove adapter.options.target_parameters"
            )
        if (reason := _why_not_option(recipe, REGISTERED[recipe.strategy.name].traits)) is not None:
            return reason
        blocks = facts.value("num_hidden_layers")
        if not isinstance(blocks, int):
            return "requires the number of blocks (num_hidden_layers), which the model's config does not say"
        if blocks < settings:
            return f"the model has {blocks} blocks, and each stage needs one; set {blocks} or less"
        return None

    def reason(self, mesh: Mesh) -> str:
        if mesh.pipeline == 1:
            return "every process computes all blocks"
        return (
            f"{mesh.pipeline} stages of consecutive blocks, on ranks {mesh.stage_size} apart, which train on the same "
            "samples: micro-batches of a step pass through them one after another (1F1B, arXiv:2104.04473). Not in "
            "accelerate.yaml, which has no key for it, nor in training_args.json: another script would give each of "
            "them samples of its own"
        )

    def spread(self, prepared: Any) -> None:
        import torch
        import torch.distributed as dist

        from toolkit.model.checkpointing import find_blocks
        from toolkit.model.sources import fill_model
        from toolkit.model.stages import cut

        resolved, model = prepared.resolved, prepared.model
        index, blocks = resolved.mesh.stage(dist.get_rank()), find_blocks(model, resolved)
        dtype = None if resolved.traits.autocast else getattr(torch, resolved.precision.compute)
        prepared.stage = cut(model, blocks, index, resolved.mesh.pipeline, resolved.source, dtype)
        prepared.blocks = [blocks[at] for at in prepared.stage.blocks]
        if "weights" not in resolved.traits.shards:
            fill_model(model)


def _why_not_option(recipe: Recipe, traits: Traits) -> str | None:
    adapter, optimizer = recipe.adapter, recipe.optimizer
    if recipe.precision == "fp16":
        return "has not been verified with fp16, whose overflow one stage alone may see; use bf16"
    if recipe.compile:
        return "has not been verified with compiled blocks; set compile: false"
    if adapter is not None and adapter.method != "lora":
        return f"has been verified with adapter.method: lora alone (it is {adapter.method})"
    if added_tokens(recipe):
        return "has not been verified with tokenizer.add_tokens; remove it"
    if not optimizer_kind(optimizer.name).elementwise:
        return f"has not been verified with optimizer.name: {optimizer.name}; use adamw, lion or sgd"
    if recipe.strategy.sync == "every" and not traits.reduces_each_micro_batch:
        return "sums gradients over the copies of a stage once per step; set strategy.sync: last, or remove it"
    if recipe.strategy.offload != "none":
        return "has not been verified with strategy.offload; set offload: none"
    return None
