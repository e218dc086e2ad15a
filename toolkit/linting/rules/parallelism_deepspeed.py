"""LT524 to LT530: tensor, context and sequence parallelism with DeepSpeed, FSDP2 and the Trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.linting.context import LintContext, true
from toolkit.linting.examples import args, fsdp2, zero
from toolkit.linting.model import Diagnostic, Files
from toolkit.linting.parallel import autotp, setting, size
from toolkit.linting.registry import rule

_SHARD = "dp_shard_size: 2"


def _section(*lines: str) -> tuple[str, ...]:
    return ("parallelism_config:", *(f"  parallelism_config_{line}" for line in lines))


def _zero(*lines: str, stage: int = 3, processes: int = 2) -> Files:
    made = zero(
        f"zero_stage: {stage}", "zero3_save_16bit_model: true", top=("mixed_precision: bf16", *_section(*lines))
    )
    return {name: text.replace("num_processes: 2", f"num_processes: {processes}") for name, text in made.items()}


def _fsdp2(*lines: str, processes: int = 2) -> Files:
    made = fsdp2(top=_section(*lines))
    return {name: text.replace("num_processes: 2", f"num_processes: {processes}") for name, text in made.items()}


@rule(
    "LT524",
    "error",
    source="accelerate 1.15.0 accelerator.py:_prepare_deepspeed (reads sp_size alone), data_loader.py:"
    "prepare_data_loader (ranks of tp get the same batch)",
    fails=_zero("tp_size: 2"),
    passes=_zero("sp_size: 2"),
)
def sizes_that_deepspeed_does_not_read(context: LintContext) -> Iterator[Diagnostic]:
    """tp_size or cp_size with DeepSpeed: nothing divides the model or the rows.

    accelerate checks the sizes, hands DeepSpeed none of them, and says nothing. With tp_size its loader gives all ranks
    of an axis the same samples, so each step trains on fewer samples than it counts; DeepSpeed divides layers by
    tensor_parallel.autotp_size of its JSON. With cp_size every rank has samples of its own, and attention exchanges
    their keys and values as if they were one row; rows are divided by sp_size.
    """
    if context.uses != "deepspeed":
        return
    if size(context, "tp") > 1:
        other = autotp(context)
        if other == 1:
            message = "DeepSpeed does not read tp_size: layers stay whole, and these ranks train on the same samples"
            yield Diagnostic(setting(context, "tp_size"), f"{message}; use tensor_parallel.autotp_size of its JSON")
        elif other != size(context, "tp"):
            message = f"DeepSpeed divides layers by autotp_size, which is {other}; remove tp_size"
            yield Diagnostic(setting(context, "tp_size"), message)
    if size(context, "cp") > 1:
        message = "DeepSpeed does not read cp_size, and attention would mix the samples of these ranks; use sp_size"
        yield Diagnostic(setting(context, "cp_size"), message)


@rule(
    "LT525",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:build_device_mesh (no mesh with sp_size), accelerator.py (sp_size "
    "is read by _prepare_deepspeed alone); transformers 5.23.0 trainer.py:compute_loss",
    fails=_fsdp2("dp_shard_size: 2", "sp_size: 2"),
    passes=_fsdp2("dp_shard_size: 2", "cp_size: 2", processes=4),
)
def rows_without_deepspeed(context: LintContext) -> Iterator[Diagnostic]:
    """sp_size without DeepSpeed: nothing divides the rows.

    accelerate makes no device mesh then, so that dp_replicate_size and dp_shard_size have no effect either, and does
    not compare the sizes with num_processes. The Trainer asks for DeepSpeed's groups before its first step and fails.
    FSDP2 divides rows by cp_size.
    """
    if size(context, "sp") > 1 and context.uses is not None and context.uses != "deepspeed":
        message = "only DeepSpeed reads sp_size; accelerate makes no device mesh then, and no other size has an effect"
        yield Diagnostic(setting(context, "sp_size"), message)


@rule(
    "LT526",
    "error",
    source="accelerate 1.15.0 accelerator.py:_prepare_deepspeed (train_batch_size from data_parallel_size); deepspeed "
    "0.19.8 runtime/config.py:_batch_assertion, runtime/sequence_parallel/parallel_state_sp.py",
    fails=_zero("sp_size: 2", processes=8),
    passes=_zero("sp_size: 2", "dp_shard_size: 4", processes=8),
)
def data_ranks_beside_rows(context: LintContext) -> Iterator[Diagnostic]:
    """dp_replicate_size × dp_shard_size × sp_size is not the number of processes.

    With sp_size accelerate does not compare them. It derives train_batch_size from dp_replicate_size × dp_shard_size,
    both 1 by default, and DeepSpeed then asserts that it is that of num_processes / sp_size ranks.
    """
    rows, processes = size(context, "sp"), context.processes
    if rows == 1 or processes is None or context.uses != "deepspeed":
        return
    product = math.prod(size(context, axis) for axis in ("dp_replicate", "dp_shard", "sp"))
    if product == processes.value:
        return
    if processes.value % rows:
        message = f"{processes.value} processes are not a multiple of sp_size {rows}: DeepSpeed rejects it"
    else:
        message = (
            f"dp_replicate_size × dp_shard_size × sp_size is {product}, num_processes is {processes.value}: set "
            f"dp_shard_size: {processes.value // rows}, from which accelerate derives train_batch_size"
        )
    yield Diagnostic(setting(context, "sp_size"), message)


@rule(
    "LT527",
    "warning",
    source="deepspeed 0.19.8 runtime/zero/stage_1_and_2.py:allreduce_bucket (divides by dp_world_size / "
    "sequence_parallel_size), runtime/zero/stage3.py (by the ranks); measured",
    fails=_zero("sp_size: 2", stage=2),
    passes=_zero("sp_size: 2"),
)
def rows_counted_twice(context: LintContext) -> Iterator[Diagnostic]:
    """sp_size with ZeRO 0, 1 or 2: gradients are sp_size times those of ZeRO-3.

    The Trainer's loss gathers the parts of a row with gradient, which multiplies by sp_size; ZeRO-3 divides by all
    ranks, the other stages by the ranks without sp. Adam hides the factor, clipping at max_grad_norm does not.
    """
    if size(context, "sp") > 1 and context.zero_stage in (0, 1, 2):
        message = (
            f"stage {context.zero_stage}: gradients are {size(context, 'sp')} times those of stage 3, before clipping"
        )
        yield Diagnostic(setting(context, "sp_size"), message)


@rule(
    "LT528",
    "error",
    source="trl 1.16.0 trainer/sft_trainer.py (ValueError); accelerate 1.15.0 big_modeling.py:"
    "_attach_context_parallel_hooks (drops the mask); deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py "
    "(attention_mask = None)",
    fails=_fsdp2("cp_size: 2") | args(packing=True, bf16=True),
    passes=_fsdp2("cp_size: 2") | args(packing=False, bf16=True),
)
def packed_rows(context: LintContext) -> Iterator[Diagnostic]:
    """Packed rows with cp_size, or with sp_size under sdpa.

    Both drop the attention mask for plain causal attention, so that packed documents attend to each other. TRL rejects
    packing with cp_size. Under sp_size flash attention separates them by their positions.
    """
    packing = context.arg("packing")
    if packing is None or not true(packing.value):
        return
    if size(context, "cp") > 1:
        yield Diagnostic(packing, "cp_size drops the attention mask: packed documents would attend to each other")
    attention = setting(context, "sp_attn_implementation")
    if size(context, "sp") > 1 and (attention is None or attention.value == "sdpa"):
        message = "sp_size under sdpa drops the attention mask: packed documents attend to each other"
        yield Diagnostic(packing, f"{message}; set parallelism_config_sp_attn_implementation: flash_attention_2")


@rule(
    "LT529",
    "error",
    source="transformers 5.23.0 trainer.py:_prepare_context_parallel_inputs (ValueError)",
    fails=_fsdp2("cp_size: 2") | args(attn_implementation="flash_attention_2", bf16=True),
    passes=_fsdp2("cp_size: 2") | args(attn_implementation="sdpa", bf16=True),
)
def context_without_sdpa(context: LintContext) -> Iterator[Diagnostic]:
    """cp_size with an attention other than sdpa: the Trainer rejects it in the first step."""
    found = context.arg("attn_implementation")
    if found is None or size(context, "cp") == 1 or context.uses != "fsdp" or context.reader != "trainer":
        return
    if isinstance(found.value, str) and found.value != "sdpa":
        yield Diagnostic(
            found, f"cp_size {size(context, 'cp')} runs with sdpa alone: the Trainer rejects {found.value}"
        )


@rule(
    "LT530",
    "note",
    source="accelerate 1.15.0 accelerator.py:_prepare_tp (imports ReplicateParallel, which transformers 5.23.0 "
    "integrations/tensor_parallel.py does not have; skips models that nothing has divided)",
    fails=_fsdp2("dp_shard_size: 2", "tp_size: 2", processes=4),
    passes=_fsdp2("dp_shard_size: 4", processes=4),
)
def tensor_beside_fsdp2(context: LintContext) -> Iterator[Diagnostic]:
    """tp_size with FSDP2: accelerate divides no layer, and fails where transformers has divided them.

    accelerate makes the mesh and gives the ranks of tp_size the same samples. It divides no layer: of a model that is
    loaded whole, all of these ranks compute the same. With DistributedConfig(tp_size=...) or tp_plan, prepare ends with
    «cannot import name 'ReplicateParallel'», which transformers has removed. Only a script that divides the model into
    plain tensors itself trains with this.
    """
    if context.distributed_type == "FSDP" and context.fsdp_version == 2 and size(context, "tp") > 1:
        message = (
            "accelerate gives these ranks the same samples and divides no layer; a model that transformers has "
            "divided ends in an ImportError (ReplicateParallel)"
        )
        yield Diagnostic(setting(context, "tp_size"), message)
