"""What other training loops compute in and what they cannot train, from their source. Imports no torch."""

from __future__ import annotations

from toolkit.planning.loops.base import LoopPrecision
from toolkit.recipe.resolve import Precision, Resolved
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels


def adapters_in_float32(resolved: Resolved) -> Precision:
    """PEFT 0.13 to 0.21 (tuners_utils.py, ``cast_adapter_dtype``) makes adapters in float32 whatever the base is in;
    bf16-pure has no autocast, so that adapters compute in float32."""
    own = resolved.precision
    if resolved.recipe.adapter is None or own.mixed or own.compute == "float32":
        return own
    return LoopPrecision(own.compute, "float32", own.frozen, packed=own.compute)


def trl_precision(resolved: Resolved) -> Precision:
    """sft_trainer.py, «When using QLoRA, the PEFT adapter weights are converted to bf16»."""
    own = resolved.precision
    if resolved.base_storage is None:
        return adapters_in_float32(resolved)
    return LoopPrecision(own.compute, "bfloat16", own.frozen, autocast=own.mixed, packed=own.frozen)


def trl_refused(resolved: Resolved) -> str:
    task = resolved.recipe.model.task
    if task_of(task).labels is not Labels.NEXT:
        return f"TRL's SFTTrainer has no task {task}"
    return ""


def litgpt_precision(resolved: Resolved) -> Precision:
    """``bf16-true``: all in bfloat16, adapters too. ``bf16-mixed``: all in float32, what is frozen too, and
    autocast."""
    own = resolved.precision
    if not own.mixed:
        return own
    return LoopPrecision(own.compute, "float32", "float32", autocast=True, packed=own.compute)


def litgpt_refused(resolved: Resolved) -> str:
    recipe = resolved.recipe
    sharded, adapter = resolved.traits.distributed, recipe.adapter
    if recipe.strategy.offload != "none":
        return "litgpt's scripts offload nothing; plan it with strategy.offload=none"
    if not sharded and recipe.activation_checkpointing != "none":
        return "litgpt recomputes activations under FSDP alone; plan it with activation_checkpointing=none"
    if sharded and recipe.activation_checkpointing != "full":
        return "litgpt recomputes every block under FSDP; plan it with activation_checkpointing=full"
    if recipe.model.task != "causal-lm":
        return f"litgpt has no task {recipe.model.task}"
    if adapter is not None and adapter.method not in ("lora", "qlora"):
        return f"plan does not know litgpt's {adapter.method}"
    if sharded and resolved.accumulation > 1 and (adapter is not None or recipe.precision != "bf16-pure"):
        return (
            "plan does not know what FSDP1 keeps where litgpt accumulates beside frozen weights or in mixed precision; "
            "plan it with batch.accumulation=1"
        )
    if adapter is not None and adapter.method == "qlora" and (sharded or recipe.precision != "bf16-pure"):
        return "litgpt quantises on one GPU and without mixed precision; plan it with precision=bf16-pure"
    return ""


def torchtune_refused(resolved: Resolved) -> str:
    recipe = resolved.recipe
    adapter = recipe.adapter
    if resolved.precision.mixed:
        return "torchtune has no mixed precision; plan it with precision=bf16-pure or fp32"
    if recipe.model.task != "causal-lm":
        return f"plan does not know torchtune's task {recipe.model.task}"
    if recipe.activation_checkpointing == "selective":
        return "torchtune recomputes whole layers; plan it with activation_checkpointing=full or none"
    if adapter is not None and adapter.method != "lora":
        return f"plan does not know torchtune's {adapter.method}"
    return ""


def torchtitan_refused(resolved: Resolved) -> str:
    recipe = resolved.recipe
    if recipe.adapter is not None:
        return "plan does not know torchtitan's adapters; plan it with adapter=null"
    if recipe.model.task != "causal-lm":
        return f"torchtitan has no task {recipe.model.task}"
    if recipe.activation_checkpointing == "selective":
        return "plan does not know which products torchtitan keeps; plan it with activation_checkpointing=full or none"
    return ""
