"""LT515 to LT520: values of parallelism_config that accelerate rejects or does not read."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext, true
from toolkit.linting.examples import fsdp2, multi_gpu
from toolkit.linting.model import Diagnostic, Files
from toolkit.linting.parallel import AXES, setting, size
from toolkit.linting.registry import rule

_CONFIG = "accelerate 1.15.0 parallelism_config.py:ParallelismConfig.__post_init__ (ValueError)"


def _parallel(*lines: str) -> Files:
    return fsdp2(top=("parallelism_config:", *(f"  parallelism_config_{line}" for line in lines)))


@rule(
    "LT515",
    "error",
    source=_CONFIG + "; commands/launch.py compares the sizes with 1",
    fails=_parallel("dp_shard_size: 0"),
    passes=_parallel("dp_shard_size: 2"),
)
def size_of_nothing(context: LintContext) -> Iterator[Diagnostic]:
    """A size of parallelism_config that is not a whole number of 1 or more."""
    for name in AXES:
        found = setting(context, f"{name}_size")
        if found is None or (isinstance(found.value, str) and found.value.isdigit() and name in AXES[:3]):
            continue
        value = found.value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Diagnostic(found, f"{value!r} is not a whole number of 1 or more")


@rule(
    "LT516",
    "error",
    source=_CONFIG + " («mutually exclusive»)",
    fails=_parallel("cp_size: 2", "sp_size: 2"),
    passes=_parallel("cp_size: 2"),
)
def two_splits_of_a_sequence(context: LintContext) -> Iterator[Diagnostic]:
    """Context and sequence parallelism are both on."""
    if size(context, "cp") > 1 and size(context, "sp") > 1:
        found = setting(context, "cp_size")
        yield Diagnostic(found, "cp_size and sp_size are both above 1: accelerate accepts only one of them")


@rule(
    "LT517",
    "error",
    source=_CONFIG,
    fails=_parallel("dp_replicate_size: 2", "tp_size: 2"),
    passes=_parallel("dp_shard_size: 2"),
)
def replicas_of_a_split_model(context: LintContext) -> Iterator[Diagnostic]:
    """Tensor or context parallelism with replicas that shard nothing."""
    split = next((name for name in ("tp", "cp") if size(context, name) > 1), None)
    if split is not None and size(context, "dp_replicate") > 1 and size(context, "dp_shard") == 1:
        yield Diagnostic(
            setting(context, f"{split}_size"),
            f"{split}_size above 1 with dp_replicate_size above 1 needs dp_shard_size above 1: accelerate rejects it",
        )


@rule(
    "LT518",
    "error",
    source=_CONFIG,
    fails=_parallel("cp_size: 2", "cp_backend: nccl"),
    passes=_parallel("cp_size: 2", "cp_backend: torch"),
)
def no_such_backend(context: LintContext) -> Iterator[Diagnostic]:
    """A backend of context parallelism that does not exist: torch is the only one."""
    found = setting(context, "cp_backend")
    if found is not None and found.value != "torch":
        yield Diagnostic(found, f"{found.value!r} is not torch, the only backend of context parallelism")


@rule(
    "LT519",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:_validate_accelerator; state.py:AcceleratorState; "
    "accelerator.py:prepare_model (DDP, none with tp_size)",
    fails=multi_gpu("parallelism_config:", "  parallelism_config_dp_shard_size: 2"),
    passes=_parallel("dp_shard_size: 2"),
)
def sharded_without_fsdp2(context: LintContext) -> Iterator[Diagnostic]:
    """Sizes of parallelism_config without FSDP2, which alone reads them.

    Under MULTI_GPU accelerate runs plain DDP with dp_shard_size and says nothing: every process holds the whole model.
    With tp_size beside it there is not even DDP, and ranks with different samples never exchange gradients. cp_size is
    rejected there. FSDP1 rejects every size; hybrid sharding there is fsdp_sharding_strategy: HYBRID_SHARD.
    """
    if context.trainer_fsdp:
        return
    large = [axis for axis in AXES if size(context, axis) > 1]
    if context.distributed_type == "FSDP" and context.fsdp_version == 1:
        for axis in large[:1] if "sp" not in large else []:  # LT525 has sp_size
            message = "fsdp_version is 1: accelerate accepts parallelism_config for FSDP2 only"
            yield Diagnostic(setting(context, f"{axis}_size"), message)
    if context.distributed_type != "MULTI_GPU":
        return
    if "dp_shard" in large:
        what = "accelerate runs plain DDP, and nothing is sharded"
        if "tp" in large:
            what = "with tp_size accelerate leaves DDP out: gradients are not summed over the ranks of dp_shard"
        yield Diagnostic(setting(context, "dp_shard_size"), f"distributed_type is MULTI_GPU: {what}")
    if "cp" in large:
        message = "distributed_type is MULTI_GPU: accelerate rejects cp_size without FSDP2"
        yield Diagnostic(setting(context, "cp_size"), message)


@rule(
    "LT520",
    "error",
    source="accelerate 1.15.0 utils/dataclasses.py:TorchContextParallelConfig, DeepSpeedSequenceParallelConfig "
    "(ValueError); deepspeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py:register_with_transformers (ValueError)",
    fails=_parallel("cp_size: 2", "cp_comm_strategy: ring"),
    passes=_parallel("cp_size: 2", "cp_comm_strategy: alltoall"),
)
def no_such_way_to_divide(context: LintContext) -> Iterator[Diagnostic]:
    """A value of context or sequence parallelism that does not exist, or lacks another.

    Keys and values are exchanged by allgather or alltoall. Sequence parallelism runs with flash_attention_2,
    flash_attention_3, sdpa, or a flash-attn kernel of the Hub, and rows of a fixed length need sp_seq_length.
    """
    found = setting(context, "cp_comm_strategy")
    if found is not None and size(context, "cp") > 1 and found.value not in ("allgather", "alltoall"):
        yield Diagnostic(found, f"{found.value!r} is not allgather or alltoall")
    if size(context, "sp") == 1:
        return
    found = setting(context, "sp_attn_implementation")
    value = found.value if found is not None else None
    hub = isinstance(value, str) and "/" in value and "flash-attn" in value
    if found is not None and not hub and value not in ("flash_attention_2", "flash_attention_3", "sdpa"):
        yield Diagnostic(found, f"{value!r} is not flash_attention_2, flash_attention_3, sdpa or a flash-attn kernel")
    found = setting(context, "sp_seq_length_is_variable")
    if found is not None and not true(found.value) and setting(context, "sp_seq_length") is None:
        yield Diagnostic(found, "rows of a fixed length, but sp_seq_length does not say which: DeepSpeed rejects it")
