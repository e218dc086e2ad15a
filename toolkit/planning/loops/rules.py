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
