"""One Accelerator per run with connected processes, also on a machine without a GPU.

Without a GPU, accelerate 1.15.0 silently does not connect the processes of a sharded strategy: with ``cpu=True``
DeepSpeed and FSDP become DDP, without it every process trains alone. To activate them, a gloo group must exist before
the Accelerator is created, and for FSDP a state with MULTI_GPU.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import InputError
from toolkit.recipe.resolve import Resolved
from toolkit.strategies import strategy_of
from toolkit.strategies.engines.process_group import connect

if TYPE_CHECKING:
    from accelerate import Accelerator

_LINEAR = torch.nn.functional.linear
"""torch's own function, restored at the start of each run: DeepSpeed 0.19.8 replaces it for ZeRO-3 and leaves the
replacement in place, so runs in one process group would depend on their order."""


def make_accelerator(resolved: Resolved, **options: Any) -> Accelerator:
    """Connect the processes and create the Accelerator for a recipe's strategy; ``options`` are passed to Accelerator.

    Raises InputError if the process was launched for another strategy or number of processes, or has no GPU although
    the recipe needs one.
    """
    _check_launch(resolved)
    _check_device(resolved)
    torch.nn.functional.linear = _LINEAR
    kind = strategy_of(resolved).distributed_type
    _forget_state()
    if kind == "NO":
        return _single(resolved, options)
    _fill_environment(resolved)
    if kind == "DEEPSPEED":
        # A machine without nvcc or a compiler can still import DeepSpeed's Python parts.
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true" if kind == "DEEPSPEED" else "false"
    os.environ["ACCELERATE_USE_FSDP"] = "true" if kind == "FSDP" else "false"
    if resolved.device == "cpu":
        connect_without_gpu(kind)
    else:
        connect("cuda")
    return _accelerator(resolved, kind, options)


def _single(resolved: Resolved, options: dict[str, Any]) -> Accelerator:
    from accelerate import Accelerator

    _drop_environment("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
    if resolved.device == "cuda" and "LOCAL_RANK" in os.environ:
        connect("cuda")  # accelerate would, over NCCL alone, and later jobs of the process may offload
    return Accelerator(cpu=resolved.device == "cpu", mixed_precision="no", **options)


def _accelerator(resolved: Resolved, kind: str, options: dict[str, Any]) -> Accelerator:
    from accelerate import Accelerator

    if kind == "DEEPSPEED":
        from accelerate import DeepSpeedPlugin

        config = strategy_of(resolved).deepspeed_config(resolved)
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(resolved.precision.compute, "no")
        options = options | {"deepspeed_plugin": plugin, "mixed_precision": precision}
        accelerator = Accelerator(gradient_accumulation_steps=resolved.accumulation, **options)
        _forget_zero_init()
        return accelerator
    if kind == "FSDP":
        engine: Any = strategy_of(resolved).engine_class()
        plugin = engine.plugin(resolved.settings, resolved.precision.compute, resolved.precision.trainable)
        options = options | engine.accelerator_options(resolved.settings)
        return Accelerator(fsdp_plugin=plugin, mixed_precision="no", **options)
    return Accelerator(cpu=resolved.device == "cpu", mixed_precision="no", **options)


def connect_without_gpu(kind: str | None = None) -> None:
    """Connect the launched processes over gloo; call it before the Accelerator (or TrainingArguments) is created.

    ``kind``: DEEPSPEED, FSDP or MULTI_GPU; default: what `accelerate launch` has configured. Your own scripts need it
    only on a machine without a GPU.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    _forget_state()
    kind = kind or _launched_kind()
    if kind == "DEEPSPEED":
        _without_shm_op()
    if kind == "MULTI_GPU":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # Accelerator(cpu=True) connects DDP by itself
        return
    connect("cpu")
    state = PartialState(backend="gloo")
    state.device = torch.device("cpu")
    if kind == "FSDP":
        state.distributed_type = DistributedType.MULTI_GPU


def new_rendezvous(attempt: int) -> None:
    """Create a new store before a restarted job connects.

    With the static rendezvous (accelerate's) torch 2.13.0 gives every attempt the agent's single store, where the ranks
    find the addresses of the previous attempt («connectFullMesh failed»). The agent's store passes the new port.
    """
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    old = TCPStore(address, port, is_master=False, wait_for_workers=False)
    name = f"toolkit/meeting/{attempt}"
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("", 0))
            old.set(name, str(probe.getsockname()[1]))
    os.environ["MASTER_PORT"] = old.get(name).decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _without_shm_op() -> None:
    """On a CPU DeepSpeed 0.19.8 compiles a shared-memory all-reduce that only inference uses. It needs a compiler, and
    a process that is killed while it loads leaves torch's build lock behind: every later job would wait forever."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _launched_kind() -> str:
    for kind in ("DEEPSPEED", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() == "true":
            return kind
    return "MULTI_GPU"


def _forget_zero_init() -> None:
    """Accelerate 1.15.0 tells transformers of ZeRO-3 even with ``zero3_init_flag`` off, and every model made from
    then on would be split while it is made, its random weights drawn differently. It is split when handed over."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _forget_state() -> None:
    """Reset accelerate's process-wide state; a process group may run several jobs in sequence. Otherwise it rejects
    another strategy or precision, or silently trains with the previous one (1.15.0)."""
    from accelerate.state import AcceleratorState, PartialState, is_initialized

    _drop_environment("ACCELERATE_USE_CPU")
    # Every object of a class has one dict for its attributes; one that is made where it is empty connects processes.
    for kind, begun in ((AcceleratorState, is_initialized()), (PartialState, object.__new__(PartialState).initialized)):
        if begun:
            vars(kind()).clear()


def _check_launch(resolved: Resolved) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != resolved.world_size:
        raise InputError(
            f"{resolved.source}: machine.processes: the recipe needs {resolved.world_size} processes, but "
            f"{world} were launched; launch with the accelerate.yaml that `toolkit config` writes for it"
        )
    kind = strategy_of(resolved).distributed_type
    for flag, meant in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_FSDP", "FSDP")):
        launched = os.environ.get(flag, "false").lower() == "true" and "TOOLKIT_SHARED_GROUP" not in os.environ
        if launched and kind != meant:
            raise InputError(
                f"{resolved.source}: strategy.name: launched for {meant}, but the recipe's strategy is "
                f"{resolved.recipe.strategy.name}; launch with the accelerate.yaml that `toolkit config` writes for it"
            )


def _check_device(resolved: Resolved) -> None:
    """Check that torch sees the recipe's GPU: the driver determined the device, but accelerate asks torch and would
    silently use the CPU."""
    if resolved.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"{resolved.source}: machine.device: cuda, but torch {torch.__version__} sees no GPU in this process; "
            "install a build of torch for the CUDA version of this machine's driver, or set machine.device: cpu"
        )


def _fill_environment(resolved: Resolved) -> None:
    """Set the variables that torchrun would set, for a strategy that runs in one process without it."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for key, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
        os.environ[key] = str(value)


def _drop_environment(*names: str) -> None:
    for name in names:
        os.environ.pop(name, None)
