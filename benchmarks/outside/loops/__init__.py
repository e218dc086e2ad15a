"""The loops of litgpt, torchtune and torchtitan, for the rows that they published: what they compute in, what they
cannot train, from their source. They make models of their own, which `toolkit plan` does not."""

from __future__ import annotations

from toolkit.planning.loops.base import Deferred, Loop, LoopPrecision
from toolkit.recipe.resolve import Precision, Resolved


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


LITGPT = Loop(
    Deferred("benchmarks.outside.loops.litgpt", "chunked_loss"),
    "litgpt's fine-tuning",
    "litgpt 0.5.12 utils.py: a head and a cross entropy of 128 positions at once; Fabric copies logits to float32; "
    "model.py: repeated keys and values, norms in float32; the head in 4 bits too",
    litgpt_precision,
    strategies=("single", "fsdp1"),
    optimizers=("adamw", "sgd"),
    kernel="foreach",
    sync="last",
    refuses=litgpt_refused,
    one_group=True,
    model=Deferred("benchmarks.outside.loops.litgpt", "build_model"),
)
TORCHTUNE = Loop(
    Deferred("benchmarks.outside.loops.torchtune", "chunked_loss"),
    "torchtune's recipes",
    "torchtune 0.6.1 modules/loss/ce_chunked_output_loss.py: eight chunks of logits, each copied to float32; norms and "
    "rotation in float32; repeated keys and values",
    strategies=("single", "fsdp2"),
    optimizers=("adamw", "sgd"),
    kernel="fused",
    unknown=frozenset({"activation_offload"}),
    refuses=torchtune_refused,
    one_group=True,
    model=Deferred("benchmarks.outside.loops.torchtune", "build_model"),
)
TORCHTITAN = Loop(
    Deferred("benchmarks.outside.loops.torchtitan", "chunked_loss"),
    "torchtitan",
    "torchtitan 0.3.0 components/loss.py: eight chunks of logits, each copied to float32, with its backward before the "
    "next; norms in the dtype of the model, rotation in float32",
    strategies=("fsdp2",),
    optimizers=("adamw",),
    kernel="fused",
    unknown=frozenset({"fp8"}),
    refuses=torchtitan_refused,
    one_group=True,
    model=Deferred("benchmarks.outside.loops.torchtitan", "build_model"),
)
