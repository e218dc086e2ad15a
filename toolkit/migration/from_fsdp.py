"""The meaning of an FSDP launch, version 1 or 2."""

from __future__ import annotations

from typing import Any

from toolkit.linting.context import LintContext, number, true
from toolkit.migration import parallel
from toolkit.migration.meaning import Meaning

_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "HYBRID_SHARD_ZERO2": (False, True),
}
_NUMBERS = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}


def read(context: LintContext, meaning: Meaning) -> None:
    """Fill ``meaning`` from the FSDP section of an accelerate config."""
    version = context.fsdp_version
    meaning.source = f"fsdp{version}"
    meaning.precision = str(context.precision.value) if context.precision and context.precision.value else "no"
    meaning.full_checkpoint = version == 1
    meaning.rank0_loading = True  # the launcher's default (--fsdp_cpu_ram_efficient_loading true)
    if version == 1:
        _strategy_of_1(context, meaning)
    else:
        reshard = context.fsdp("reshard_after_forward")
        meaning.reshard = true(reshard.value) if reshard else True
    for key, entry in context.accelerate.section("fsdp_config").items():
        name = key.removeprefix("fsdp_")
        _key(name, entry.node.plain(), str(context.accelerate.place(entry.start)), meaning, version)
    parallel.of_fsdp(context, meaning, version)


def _strategy_of_1(context: LintContext, meaning: Meaning) -> None:
    setting = context.fsdp("sharding_strategy")
    name = str(setting.value).upper() if setting else "FULL_SHARD"
    name = _NUMBERS.get(name, name)
    place = str(setting.place) if setting else "fsdp_sharding_strategy"
    if name not in _STRATEGIES:
        meaning.refuse(place, f"{name} shards nothing: it is plain data parallelism (distributed_type MULTI_GPU)")
        return
    meaning.reshard, hybrid = _STRATEGIES[name]
    if not hybrid:
        return
    machines = context.acc("num_machines")
    count = machines.value if machines and number(machines.value) else 1
    if context.processes is None or context.processes.value % max(1, count):
        meaning.refuse(place, f"{name}: num_processes must be a multiple of num_machines to know the size of a group")
        return
    # torch shards inside a machine and replicates across: FSDP1's default groups for HYBRID_SHARD.
    meaning.replicas = max(1, count)
    meaning.shards = context.processes.value // meaning.replicas
    meaning.note(
        place,
        f"{name} is {meaning.replicas} replicas of {meaning.shards} shards in parallelism_config",
    )


def _key(name: str, value: Any, place: str, meaning: Meaning, version: int) -> None:
    if name in ("version", "sharding_strategy"):
        return
    if name == "reshard_after_forward":
        if version == 1:
            meaning.note(place, "never used under FSDP1 (sharding_strategy is)")
    elif name == "state_dict_type":
        kind = str(value).upper()
        if kind == "LOCAL_STATE_DICT":
            meaning.refuse(place, "LOCAL_STATE_DICT exists only in FSDP1")
        meaning.full_checkpoint = kind == "FULL_STATE_DICT"
    elif name == "auto_wrap_policy":
        meaning.wrap = str(value).upper()
    elif name == "transformer_layer_cls_to_wrap":
        meaning.wrap_classes = value
    elif name == "min_num_params":
        meaning.wrap_size = value
    elif name == "offload_params":
        meaning.offload = meaning.offload_optimizer = true(value)
    elif name == "cpu_ram_efficient_loading":
        meaning.rank0_loading = true(value)
    elif name == "activation_checkpointing":
        meaning.checkpointing = true(value)
    elif name == "activation_checkpointing_offload" and not true(value):
        return
    elif name in ("use_orig_params", "sync_module_states", "backward_prefetch", "forward_prefetch"):
        meaning.note(place, f"{name} exists only in FSDP1; the result does not depend on it")
    else:
        meaning.refuse(place, f"{name} has no equivalent")
