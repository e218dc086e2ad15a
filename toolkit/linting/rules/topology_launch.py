"""LT5xx: processes, machines and launch commands."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.linting import keys
from toolkit.linting.context import LintContext, number, true
from toolkit.linting.examples import acc, fsdp2, multi_gpu, shell, zero
from toolkit.linting.model import Diagnostic, Severity
from toolkit.linting.near import meant, nearest
from toolkit.linting.registry import rule

_LAUNCH = "accelerate 1.15.0 utils/launch.py"


@rule(
    "LT502",
    "error",
    source=_LAUNCH + ":prepare_multi_gpu_env (the address becomes the text 'None')",
    fails=multi_gpu("num_machines: 2", "machine_rank: 0"),
    passes=multi_gpu("num_machines: 2", "machine_rank: 0", "main_process_ip: 10.0.0.1", "main_process_port: 29500"),
)
def machines_without_address(context: LintContext) -> Iterator[Diagnostic]:
    """Several machines, but no address of the main machine."""
    machines = context.acc("num_machines")
    if machines is None or not number(machines.value) or machines.value < 2:
        return
    if not context.sets_acc("main_process_ip"):
        severity: Severity | None = None if context.launch.launcher else "warning"  # the flag may be given at launch
        yield Diagnostic(machines, f"{machines.value} machines, but main_process_ip is not set", severity=severity)


@rule(
    "LT503",
    "error",
    source=_LAUNCH + " (num_processes // num_machines: the rest is dropped)",
    fails=acc(
        "distributed_type: MULTI_GPU",
        "mixed_precision: bf16",
        "num_processes: 3",
        "num_machines: 2",
        "machine_rank: 0",
        "main_process_ip: 10.0.0.1",
    ),
    passes=acc(
        "distributed_type: MULTI_GPU",
        "mixed_precision: bf16",
        "num_processes: 4",
        "num_machines: 2",
        "machine_rank: 0",
        "main_process_ip: 10.0.0.1",
    ),
)
def uneven_machines(context: LintContext) -> Iterator[Diagnostic]:
    """num_processes is not a multiple of num_machines.

    num_processes counts all machines; each starts the whole-number share, and the rest never start.
    """
    machines, processes = context.acc("num_machines"), context.processes
    if machines and processes and number(machines.value) and machines.value > 1 and processes.value % machines.value:
        each = processes.value // machines.value
        yield Diagnostic(
            processes,
            f"{processes.value} processes on {machines.value} machines: each starts {each}, the "
            "remainder is not started",
        )


@rule(
    "LT504",
    "warning",
    source=_LAUNCH + ":prepare_multi_gpu_env",
    fails=acc(
        "distributed_type: FSDP",
        "mixed_precision: bf16",
        "num_processes: 1",
        "fsdp_config:",
        "  fsdp_version: 2",
    ),
    passes=fsdp2(),
)
def sharded_over_one(context: LintContext) -> Iterator[Diagnostic]:
    """Sharding over one process saves no memory."""
    processes = context.processes
    if (
        processes
        and processes.value == 1
        and context.uses in ("fsdp", "deepspeed", "ddp")
        and processes.source.kind != "launch"
    ):
        offloads = any(context.ds(f"zero_optimization.offload_{p}.device") for p in ("optimizer", "param"))
        offloads = offloads or any(context.acc(f"deepspeed_config.offload_{p}_device") for p in ("optimizer", "param"))
        if context.uses != "deepspeed" or not offloads:
            yield Diagnostic(
                processes, f"one process: {context.distributed_type} has nothing to shard and adds overhead"
            )


@rule(
    "LT507",
    "error",
    source="accelerate 1.15.0 commands/launch.py:_validate_launch_command (ValueError)",
    fails=multi_gpu("gpu_ids: '0'"),
    passes=multi_gpu("gpu_ids: '0,1'"),
)
def too_few_gpus(context: LintContext) -> Iterator[Diagnostic]:
    """gpu_ids names fewer GPUs than there are processes on a machine."""
    setting, processes = context.acc("gpu_ids"), context.processes
    if setting is None or not isinstance(setting.value, str) or setting.value == "all":
        return
    machines = context.acc("num_machines")
    count = len([part for part in setting.value.split(",") if part.strip()])
    each = (
        processes.value // max(1, machines.value if machines and number(machines.value) else 1) if processes else None
    )
    if context.distributed_type == "MULTI_GPU" and count < 2 and (machines is None or machines.value in (None, 1)):
        yield Diagnostic(setting, "one GPU id with MULTI_GPU: accelerate rejects this")
    elif each is not None and context.distributed_type not in (None, "NO") and count < each:
        yield Diagnostic(setting, f"{count} GPUs for {each} processes: two processes would share a GPU")


@rule(
    "LT508",
    "error",
    source=_LAUNCH + " (node_rank goes to torchrun, which counts from 0)",
    fails=multi_gpu("num_machines: 2", "machine_rank: 2", "main_process_ip: 10.0.0.1"),
    passes=multi_gpu("num_machines: 2", "machine_rank: 1", "main_process_ip: 10.0.0.1"),
)
def rank_of_no_machine(context: LintContext) -> Iterator[Diagnostic]:
    """machine_rank is not below num_machines: ranks count from 0."""
    rank, machines = context.acc("machine_rank"), context.acc("num_machines")
    count = machines.value if machines and number(machines.value) else 1
    if rank and number(rank.value) and rank.value >= max(1, count):
        yield Diagnostic(rank, f"machine_rank {rank.value} with {count} machine{'s' * (count > 1)}: ranks count from 0")


@rule(
    "LT509",
    "warning",
    source="accelerate 1.15.0 commands/launch.py:launch_command (simple_launcher starts the script once)",
    fails=acc("distributed_type: 'NO'", "mixed_precision: bf16", "num_processes: 4"),
    passes=multi_gpu(),
)
def processes_that_never_start(context: LintContext) -> Iterator[Diagnostic]:
    """Several processes with a distributed_type that starts one.

    NO and MULTI_CPU go through the simple launcher, which runs the script once (MULTI_CPU unless mpirun is
    set).
    """
    processes = context.acc("num_processes")
    mpi = context.acc("mpirun_config.mpirun_hostfile")
    flags = any(context.launch.get(flag) for flag in ("multi_gpu", "use_deepspeed", "use_fsdp"))
    if (
        (
            processes
            and number(processes.value)
            and processes.value > 1
            and context.distributed_type in ("NO", "MULTI_CPU")
        )
        and not flags
        and mpi is None
    ):
        yield Diagnostic(
            processes,
            f"distributed_type {context.distributed_type} starts one process, not {processes.value}",
        )


@rule(
    "LT510",
    "warning",
    source="accelerate 1.15.0 state.py:PartialState (cpu=True takes plain data parallel); measured",
    fails=zero("zero_stage: 2", top=("mixed_precision: bf16", "use_cpu: true")),
    passes=zero("zero_stage: 2", top=("mixed_precision: bf16", "use_cpu: false")),
)
def sharding_on_cpu(context: LintContext) -> Iterator[Diagnostic]:
    """use_cpu with DeepSpeed or FSDP: the launcher's sharding is for accelerators."""
    setting = context.acc("use_cpu")
    if setting and true(setting.value) and context.distributed_type in ("DEEPSPEED", "FSDP"):
        yield Diagnostic(
            setting,
            f"use_cpu has no effect on a {context.distributed_type} launch: the script's "
            "Accelerator(cpu=True) would use plain DDP",
        )


@rule(
    "LT511",
    "error",
    source="accelerate 1.15.0 commands/launch.py:_validate_launch_command (ValueError)",
    fails=shell("accelerate launch --use_fsdp --use_deepspeed train.py"),
    passes=shell("accelerate launch --use_fsdp train.py"),
)
def two_launch_types(context: LintContext) -> Iterator[Diagnostic]:
    """Two launch types in one command."""
    if context.launch.launcher != "accelerate":
        return
    given = [
        flag for flag in ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp") if context.launch.get(flag) is True
    ]
    if len(given) > 1:
        yield Diagnostic(
            LintContext._in(context.launch, given[1]),
            f"--{given[0]} and --{given[1]}: accelerate launch accepts only one of them",
        )


@rule(
    "LT512",
    "error",
    source="accelerate 1.15.0 commands/launch.py (argparse: unrecognised options end the launch, allow_abbrev=False); "
    "deepspeed 0.19.8 launcher/runner.py:parse_args",
    fails=shell("accelerate launch --num_process 4 train.py"),
    passes=shell("accelerate launch --num_processes 4 train.py"),
)
def unknown_flag(context: LintContext) -> Iterator[Diagnostic]:
    """Unknown launcher flag.

    accelerate launch takes no abbreviations. deepspeed takes the beginning of a flag that no other flag begins with.
    """
    if context.launch.launcher not in ("accelerate", "deepspeed"):
        return
    table = keys.package(context.launch.launcher)["sections"]["flags"]
    known = {fact["dest"] for fact in table.values()}
    for key, entry in context.launch.section("").items():
        begun = [flag for flag in table if flag.startswith(key)] if len(key) > 1 else []
        abbreviated = context.launch.launcher == "deepspeed" and len(begun) == 1
        if key not in known and not abbreviated:
            setting = context.of(context.launch, key, entry)
            yield Diagnostic(setting, f"{context.launch.launcher} has no flag --{key}{meant(nearest(key, known))}")
