"""LT51x: values of parallelism_config that accelerate rejects or does not read."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.examples import fsdp2, multi_gpu
from toolkit.linting.files.tree import Source
from toolkit.linting.model import Diagnostic, Files, Setting
from toolkit.linting.registry import rule

_CONFIG = "accelerate 1.15.0 parallelism_config.py:ParallelismConfig.__post_init__ (ValueError)"
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


def _parallel(*lines: str) -> Files:
    return fsdp2(top=("parallelism_config:", *(f"  parallelism_config_{line}" for line in lines)))


def _setting(source: Source, name: str) -> Setting | None:
    key = f"parallelism_config.parallelism_config_{name}"
    entry = source.entry(key)
    return Setting(source, key, entry) if entry is not None else None


def _size(context: LintContext, name: str) -> int:
    setting = _setting(context.accelerate, f"{name}_size")
    value = setting.value if setting is not None else 1
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


@rule(
    "LT515",
    "error",
    source=_CONFIG + "; commands/launch.py compares the sizes with 1",
    fails=_parallel("dp_shard_size: 0"),
    passes=_parallel("dp_shard_size: 2"),
)
def size_of_nothing(context: LintContext) -> Iterator[Diagnostic]:
    """A size of parallelism_config that is not a whole number of 1 or more."""
    for name in _SIZES:
        setting = _setting(context.accelerate, f"{name}_size")
        if setting is None or (isinstance(setting.value, str) and setting.value.isdigit() and name in _SIZES[:3]):
            continue
        value = setting.value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Diagnostic(setting, f"{value!r} is not a whole number of 1 or more")


@rule(
    "LT516",
    "error",
    source=_CONFIG + " («mutually exclusive»)",
    fails=_parallel("cp_size: 2", "sp_size: 2"),
    passes=_parallel("cp_size: 2"),
)
def two_splits_of_a_sequence(context: LintContext) -> Iterator[Diagnostic]:
    """Context and sequence parallelism are both on."""
    if _size(context, "cp") > 1 and _size(context, "sp") > 1:
        setting = _setting(context.accelerate, "cp_size")
        yield Diagnostic(setting, "cp_size and sp_size are both above 1: accelerate accepts only one of them")


@rule(
    "LT517",
    "error",
    source=_CONFIG,
    fails=_parallel("dp_replicate_size: 2", "tp_size: 2"),
    passes=_parallel("dp_shard_size: 2"),
)
def replicas_of_a_split_model(context: LintContext) -> Iterator[Diagnostic]:
    """Tensor or context parallelism with replicas that shard nothing."""
    split = next((name for name in ("tp", "cp") if _size(context, name) > 1), None)
    if split is not None and _size(context, "dp_replicate") > 1 and _size(context, "dp_shard") == 1:
        setting = _setting(context.accelerate, f"{split}_size")
        yield Diagnostic(
            setting,
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
    setting = _setting(context.accelerate, "cp_backend")
    if setting is not None and setting.value != "torch":
        yield Diagnostic(setting, f"{setting.value!r} is not torch, the only backend of context parallelism")


@rule(
    "LT519",
    "error",
    source="accelerate 1.15.0 parallelism_config.py:_validate_accelerator; accelerator.py:prepare_model (DDP)",
    fails=multi_gpu("parallelism_config:", "  parallelism_config_dp_shard_size: 2"),
    passes=_parallel("dp_shard_size: 2"),
)
def sharded_without_fsdp2(context: LintContext) -> Iterator[Diagnostic]:
    """dp_shard_size without FSDP2: only FSDP2 reads it.

    Under MULTI_GPU accelerate runs plain DDP and says nothing: every process holds the whole model. Under FSDP1 it
    rejects the section; hybrid sharding there is fsdp_sharding_strategy: HYBRID_SHARD.
    """
    setting = _setting(context.accelerate, "dp_shard_size")
    if setting is None or _size(context, "dp_shard") == 1 or context.trainer_fsdp:
        return
    if context.distributed_type == "MULTI_GPU":
        yield Diagnostic(setting, "distributed_type is MULTI_GPU: accelerate runs plain DDP, and nothing is sharded")
    elif context.distributed_type == "FSDP" and context.fsdp_version == 1:
        yield Diagnostic(setting, "fsdp_version is 1: accelerate accepts parallelism_config for FSDP2 only")
