"""DC1xx: transformers' DistributedConfig, with which `from_pretrained` splits a model over the processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, true
from toolkit.linting.edits import rename, set_value
from toolkit.linting.examples import args, distributed, multi_gpu
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_CONFIG = "transformers 5.23.0 distributed/configuration_utils.py:DistributedConfig"
_SIZES = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size")
"""What the processes are divided by; experts are divided within fsdp_size x tp_size."""


def _size(context: LintContext, key: str) -> int | None:
    """A size that is a whole number of 1 or more; 1 where it is not set; None where it is neither."""
    setting = context.split(key)
    value = 1 if setting is None or setting.value is None else setting.value
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


@rule(
    "DC101",
    "error",
    source=f"{_CONFIG}.from_dict (keeps the fields that it knows, rejects nothing)",
    fails=distributed(fsdp_size=2, fsdp_mixed_precison=True),
    passes=distributed(fsdp_size=2, fsdp_mixed_precision=True),
)
def unknown(context: LintContext) -> Iterator[Diagnostic]:
    """A key that DistributedConfig does not have: from_dict drops it in silence.

    from_pretrained takes a mapping in place of a DistributedConfig, and reads it with from_dict.
    """
    known = keys.section("transformers", "distributed_config")
    for key, entry in context.distributed.section("").items():
        if key in known or key.startswith(("_", "//")):
            continue
        setting, near = Setting(context.distributed, key, entry), nearest(key, known)
        fix = rename(setting, near) if near and near not in context.distributed.section("") else None
        yield Diagnostic(setting, f'DistributedConfig has no "{key}": it is dropped{meant(near)}', fix)


@rule(
    "DC102",
    "error",
    source=f"{_CONFIG}._resolve_parallelism, _validate_mesh_config (ValueError)",
    fails=distributed(fsdp_size=4, ep_size=3),
    passes=distributed(fsdp_size=4, ep_size=2),
)
def rejected_size(context: LintContext) -> Iterator[Diagnostic]:
    """A size that DistributedConfig rejects.

    Every size is at least 1. Experts are divided within fsdp_size x tp_size: ep_size is a multiple of tp_size and
    divides their product. FSDP and pipeline parallelism exclude each other.
    """
    for key in (*_SIZES, "ep_size"):
        setting = context.split(key)
        if setting is not None and isinstance(setting.value, int) and setting.value < 1:
            yield Diagnostic(setting, f"{setting.value} is less than 1")
    tensor, shard, expert = (_size(context, key) for key in ("tp_size", "fsdp_size", "ep_size"))
    found = context.split("ep_size")
    if found is not None and expert and expert > 1 and tensor and shard:
        if context.split("tp_size") is not None and expert % tensor:
            yield Diagnostic(found, f"ep_size {expert} is not a multiple of tp_size {tensor}")
        elif (shard * tensor) % expert and not _derived(context):
            yield Diagnostic(found, f"ep_size {expert} does not divide fsdp_size × tp_size = {shard * tensor}")
    stages, copies = _size(context, "pp_size"), _size(context, "dp_replicate_size")
    if stages and stages > 1 and (shard or 1) * (copies or 1) > 1:
        yield Diagnostic(context.split("pp_size"), f"pp_size {stages} with FSDP: transformers accepts only one of them")


def _derived(context: LintContext) -> bool:
    """Whether tp_size comes from the number of processes: tp_plan is set and tp_size is not."""
    plan, size = context.split("tp_plan"), context.split("tp_size")
    return plan is not None and plan.value is not None and (size is None or size.value is None)


@rule(
    "DC103",
    "error",
    source="transformers 5.23.0 distributed/utils.py:initialize_distributed_mesh (RuntimeError)",
    fails=distributed(fsdp_size=4) | multi_gpu(),
    passes=distributed(fsdp_size=2) | multi_gpu(),
)
def other_number_of_processes(context: LintContext) -> Iterator[Diagnostic]:
    """The sizes of DistributedConfig do not multiply to the number of processes."""
    processes, sizes = context.processes, [_size(context, key) for key in _SIZES]
    if "distributed" not in context.kinds or processes is None or _derived(context) or None in sizes:
        return
    product = math.prod(size for size in sizes if size is not None)
    if product > 1 and product != processes.value * _nodes(context, processes):
        named = next(setting for key in ("fsdp_size", *_SIZES) if (setting := context.split(key)) is not None)
        text = f"the sizes multiply to {product}, but {processes.described} processes start: from_pretrained ends"
        yield Diagnostic(named, text)


def _nodes(context: LintContext, processes: Setting) -> int:
    """num_processes counts all machines, nproc_per_node and num_gpus those of one."""
    nodes = 1 if processes.name == "num_processes" else context.launch.get("nnodes", 1)
    return nodes if isinstance(nodes, int) else 1


@rule(
    "DC104",
    "warning",
    source=f"{_CONFIG} (enable_sequence_parallel: «Reserved for sequence parallelism. Not wired up yet.»)",
    fails=distributed(tp_size=2, enable_sequence_parallel=True),
    passes=distributed(tp_size=2),
)
def sequence_parallel(context: LintContext) -> Iterator[Diagnostic]:
    """enable_sequence_parallel is true: transformers does not use it yet."""
    setting = context.split("enable_sequence_parallel")
    if setting is not None and true(setting.value):
        yield Diagnostic(setting, "enable_sequence_parallel has no effect: no code of transformers reads it")


@rule(
    "DC105",
    "error",
    source="transformers 5.23.0 trainer.py:Trainer.__init__ (ValueError)",
    fails=distributed(fsdp_size=2) | args(save_strategy="steps"),
    passes=distributed(fsdp_size=2) | args(save_strategy="steps", save_only_model=True),
)
def checkpoint_with_optimizer(context: LintContext) -> Iterator[Diagnostic]:
    """The Trainer cannot save the optimizer of a model that from_pretrained has split.

    The Trainer rejects it at its start: set save_only_model: true, or save_strategy: no. Such a run cannot be resumed.
    save_strategy is steps where nothing is written.
    """
    if "distributed" not in context.kinds or not context.trainer_run or not _splits(context):
        return
    only, strategy = context.arg("save_only_model"), context.arg("save_strategy")
    unsure = context.arg_unsure("save_strategy") or context.arg_unsure("save_only_model")
    if unsure or (only is not None and true(only.value)):
        return
    text = "the Trainer rejects it with a DistributedConfig: set save_only_model: true"
    if strategy is None:
        yield context.at_file(context.args, f"save_strategy is steps by default, and {text}", "save_strategy")
    elif strategy.value not in ("no", False):
        fix = set_value(only, True) if only is not None else None
        yield Diagnostic(strategy, f"save_strategy {strategy.value} saves the optimizer, and {text}", fix)


def _splits(context: LintContext) -> bool:
    return _derived(context) or any((_size(context, key) or 1) > 1 for key in _SIZES)


@rule(
    "DC106",
    "note",
    source=f"{_CONFIG}._resolve_parallelism (FutureWarning)",
    fails=distributed(tp_size=2, enable_expert_parallel=True),
    passes=distributed(tp_size=2, ep_size=2, tp_plan={}),
)
def old_name_of_experts(context: LintContext) -> Iterator[Diagnostic]:
    """enable_expert_parallel without ep_size is deprecated.

    It means ep_size: the value of tp_size, and tp_plan: {}, so that only experts are divided.
    """
    setting, size = context.split("enable_expert_parallel"), context.split("ep_size")
    if setting is not None and true(setting.value) and (size is None or size.value is None):
        tensor = context.distributed.get("tp_size") or "the value of tp_size"
        yield Diagnostic(setting, f"deprecated: set ep_size: {tensor} and tp_plan: {{}}, which mean the same")
