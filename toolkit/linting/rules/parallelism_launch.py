"""LT521 to LT523: whether `accelerate launch` reads parallelism_config, and where its ranks are."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting.context import LintContext
from toolkit.linting.examples import ds, fsdp2, shell, zero
from toolkit.linting.model import Diagnostic, Setting
from toolkit.linting.parallel import autotp, launch_type, processes_of_a_machine, setting, size, written
from toolkit.linting.registry import rule

_LAUNCH = "accelerate 1.15.0 commands/launch.py:_validate_launch_command"
_MACHINES = ("num_machines: 2", "machine_rank: 0", "main_process_ip: 10.0.0.1")
_OVER_MACHINES = zero("deepspeed_config_file: ds.json", top=_MACHINES)
_COMMAND = "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 --config_file accelerate.yaml"
_FROM_FILE = "accelerate launch --config_file accelerate.yaml --num_processes 4"
_SHARDED = fsdp2(top=("parallelism_config:", "  parallelism_config_dp_shard_size: 4"))


@rule(
    "LT521",
    "error",
    source=_LAUNCH + " (the file's section counts only where the command names no launch type)",
    fails=_SHARDED | shell(f"{_COMMAND} train.py"),
    passes=_SHARDED | shell(f"{_COMMAND} --use_parallelism_config train.py"),
)
def sizes_that_nothing_reads(context: LintContext) -> Iterator[Diagnostic]:
    """A parallelism_config that accelerate launch does not read.

    There is no key to turn it on in the file: a section that is not empty is used. That holds only where the command
    names no launch type. Beside --use_fsdp, --use_deepspeed or --multi_gpu the sizes, from the file or the command,
    count only with --use_parallelism_config; without it every size is 1 and nothing says so.
    """
    if context.launch.launcher != "accelerate" or context.launch.unsure("use_parallelism_config"):
        return
    if context.launch.get("use_parallelism_config") is True:
        return
    flags = [Setting(context.launch, key, entry) for key, entry in context.launch.section("").items()]
    flags = [flag for flag in flags if flag.key.startswith("parallelism_config_")]
    kind = launch_type(context)
    if kind is not None:
        for found in flags or written(context)[:1]:
            message = f"not read: --{kind} without --use_parallelism_config leaves every size at 1"
            yield Diagnostic(found, message)
    elif not written(context) and not (context.launch.has("config_file") and "accelerate" not in context.kinds):
        for found in flags:  # no file, or one without the section
            yield Diagnostic(found, "not read without --use_parallelism_config (or a parallelism_config in the file)")


@rule(
    "LT522",
    "error",
    source=_LAUNCH + " (ValueError, before the file is read)",
    fails=_SHARDED | shell(f"{_FROM_FILE} --use_parallelism_config train.py"),
    passes=_SHARDED | shell(f"{_FROM_FILE} train.py"),
)
def flag_without_fsdp(context: LintContext) -> Iterator[Diagnostic]:
    """--use_parallelism_config without --use_fsdp in the same command.

    accelerate launch rejects this before it reads the file, whatever distributed_type the file has. With the section in
    the file and no launch type in the command, neither flag is needed.
    """
    if context.launch.launcher != "accelerate" or context.launch.get("use_parallelism_config") is not True:
        return
    if context.launch.get("use_fsdp") is not True and not context.launch.unsure("use_fsdp"):
        entry = context.launch.entry("use_parallelism_config")
        assert entry is not None
        message = "rejected without --use_fsdp in the command, also where the file says FSDP"
        yield Diagnostic(Setting(context.launch, "use_parallelism_config", entry), message)


@rule(
    "LT523",
    "warning",
    source="accelerate 1.15.0 parallelism_config.py:_get_mesh (tp is the last axis: consecutive ranks); "
    "deepspeed 0.19.8 utils/groups.py:_init_tp_mesh_device",
    fails=_OVER_MACHINES | ds(tensor_parallel={"autotp_size": 2}),
    passes=_OVER_MACHINES | ds(tensor_parallel={"autotp_size": 1}),
)
def layers_over_machines(context: LintContext) -> Iterator[Diagnostic]:
    """Ranks that divide a layer are on several machines.

    They add up hidden states in every layer, in forward and backward, over the network between machines. tp_size and
    autotp_size are to divide the processes of a machine.
    """
    node = processes_of_a_machine(context)
    if node is None or node < 1:
        return
    sources = (
        (setting(context, "tp_size"), size(context, "tp")),
        (context.ds("tensor_parallel.autotp_size"), autotp(context)),
    )
    for found, count in sources:
        if found is None or count == 1 or node % count == 0:
            continue
        if context.processes is not None and context.processes.value <= node and count > node:
            continue  # one machine with too few processes: LT505, DS227
        yield Diagnostic(
            found,
            f"{count} consecutive ranks divide each layer, but a machine starts {node} processes: hidden states cross "
            "the network in every layer",
        )
