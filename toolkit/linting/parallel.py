"""The sizes of accelerate's parallelism_config and DeepSpeed's AutoTP, as one run's files give them."""

from __future__ import annotations

from toolkit.linting.context import LintContext, number
from toolkit.linting.model import Setting

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
# Launch types of the command: beside one of them `accelerate launch` takes no type from the file, nor
# use_parallelism_config (accelerate 1.15.0 commands/launch.py:_validate_launch_command).
LAUNCH_TYPES = ("multi_gpu", "tpu", "tpu_use_cluster", "use_deepspeed", "use_fsdp", "use_megatron_lm")


def setting(context: LintContext, name: str) -> Setting | None:
    """A key of parallelism_config by its name without the long prefix: the command's flag, else the file's."""
    return context.acc(f"parallelism_config.parallelism_config_{name}")


def size(context: LintContext, axis: str) -> int:
    """The size of an axis; 1 where it is not written, or not a whole number of 1 or more (LT515 reports that)."""
    found = setting(context, f"{axis}_size")
    value = found.value if found is not None else 1
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else 1


def written(context: LintContext) -> list[Setting]:
    """The keys of parallelism_config in the accelerate config, prefix or not."""
    entries = context.accelerate.section("parallelism_config")
    return [Setting(context.accelerate, f"parallelism_config.{key}", entry) for key, entry in entries.items()]


def autotp(context: LintContext) -> int:
    """``tensor_parallel.autotp_size``; 1 without AutoTP."""
    value = context.deepspeed.get("tensor_parallel.autotp_size")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else 1


def processes_of_a_machine(context: LintContext) -> int | None:
    """Processes that a machine starts; None if the files do not say, or the machines start different numbers."""
    processes, machines = context.processes, context.acc("num_machines")
    if processes is None:
        return None
    if processes.name != "num_processes":
        return processes.value  # torchrun and deepspeed count the processes of a machine
    count = int(machines.value) if machines is not None and number(machines.value) and machines.value > 1 else 1
    return processes.value // count if processes.value % count == 0 else None


def launch_type(context: LintContext) -> str | None:
    """The launch type that the command names."""
    if context.launch.launcher != "accelerate":
        return None
    return next((flag for flag in LAUNCH_TYPES if context.launch.get(flag) is True), None)


def reads_sizes(context: LintContext) -> bool:
    """Whether accelerate reads parallelism_config: by its flag, else from a file that alone names the launch type."""
    if context.launch.launcher == "accelerate" and context.launch.get("use_parallelism_config") is True:
        return True
    return launch_type(context) is None and bool(written(context))
