"""What the toolkit replaces in torch, and the private names of torch that it uses."""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn.functional import ScalingType, scaled_mm

from toolkit.errors import InputError
from toolkit.upstream.replacement import Replacement, missing, named


def use_one_gloo_thread() -> None:
    """Give every gloo group that this process creates from now on one worker thread instead of two, as long as this
    torch needs it.

    torch 2.13.0: both threads of a group assign to the same ``std::string`` without a lock
    (``ProcessGroupGloo::runLoop``, ``pgStatus_->lastCompletedWorkName``). Names longer than 15 characters are
    allocated on the heap; ``ALLGATHER_COALESCED``, every all-gather of a DTensor, is one. The double free ends the
    process with signal 6 or 11, or hangs it, at an unrelated place. Ranks start collectives in the same order, so one
    thread cannot deadlock. There is no public way: ``init_process_group`` takes options for NCCL alone.
    """
    if _two_threads_of_gloo():
        return
    group: Any = dist.ProcessGroupGloo
    create = group.__init__
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def created(self: Any, store: Any, rank: int, size: int, options: Any = None, **given: Any) -> None:
        if options is None and "timeout" in given:  # how torch creates groups; explicit options are kept
            options = group._Options()
            options._timeout, options._threads, options._devices = given.pop("timeout"), 1, _devices(group)
        create(self, store, rank, size, *([] if options is None else [options]), **given)

    group.__init__ = created


@functools.cache
def _devices(group: Any) -> list[Any]:
    """The network interfaces that torch uses for a group without options, the same ones for all groups. Each has a
    thread that wakes up 100 times a second, and torch 2.13.0 makes new ones for every group: a process with 200 groups
    took 12 % of a core while it waited, and takes 0.1 % now."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not names:
        return [group.create_default_device()]
    return [group.create_device(interface=name) for name in names.split(",")]


@functools.cache
def _two_threads_of_gloo() -> str:
    """Why threads are left alone, or "". The race is in torch's own library, where a process that tried it would die.
    torch 2.14.1, where it is gone, makes groups with other arguments, and takes no options."""
    if not dist.is_gloo_available():
        return "this torch has no gloo"
    form = dist.ProcessGroupGloo.__init__.__doc__ or ""
    if not hasattr(dist.ProcessGroupGloo, "_Options") or "options:" not in form or "enable_reconfigure" in form:
        return "this torch makes its groups otherwise, and gives their threads names of their own"
    return ""


# ---------------------------------------------------------------------- operators as they are dispatched

_MODES = "torch.utils._python_dispatch"


class _Blind:
    """In place of a mode, where torch has none: whoever cannot do without it is refused."""

    def __enter__(self) -> Self:
        raise InputError(f"torch {torch.__version__} does not show its operators ({_sees()}): toolkit doctor names it")

    def __exit__(self, *error: Any) -> None:
        """Nothing was entered."""


DispatchMode: Any = named(f"{_MODES}:TorchDispatchMode") or _Blind
"""Sees every operator that torch dispatches, those of a backward too. torch's own documentation (Extending PyTorch)
names it by this path; ``torch.overrides.TorchFunctionMode``, which is public, sees no backward and no collective."""


class UncompiledMode(DispatchMode):
    """torch (2.13.0) would put torch.compile's off switch around every operation seen here; nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def sees_operators() -> bool:
    return DispatchMode is not _Blind


def inside_a_mode() -> bool:
    """Whether a dispatch mode is entered now: tensors may be fake ones."""
    asked = named(f"{_MODES}:is_in_torch_dispatch_mode")
    return asked is not None and asked()


def modes_off() -> Any:
    """Context without the modes that are entered now."""
    return (named(f"{_MODES}:_disable_current_modes") or contextlib.nullcontext)()


def _sees() -> str:
    return missing(*(f"{_MODES}:{one}" for one in ("TorchDispatchMode", "_disable_current_modes",
                                                   "is_in_torch_dispatch_mode")))  # fmt: skip


def notices_changes() -> bool:
    return hasattr(torch.Tensor, "_version")


def changes_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place; always 0 where torch does not say. Autograd compares this number
    itself, and shows it nowhere else."""
    return int(getattr(tensor, "_version", 0))


# ---------------------------------------------------------------------- tensors without values

_FAKE = "torch._subclasses.fake_tensor"


def fake_mode() -> Any:
    """Context in which tensors that are made have no values, and operators know shapes all the same. The meta device,
    which is public, has no device of its own, and no answer where an operator asks for values. Raises InputError where
    torch has no such mode."""
    mode = named(f"{_FAKE}:FakeTensorMode")
    if mode is None:
        raise InputError(f"torch {torch.__version__} has no tensors without values ({missing(_FAKE)}): toolkit doctor")
    return mode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    kind = named(f"{_FAKE}:FakeTensor")
    return kind is not None and isinstance(value, kind)


# ---------------------------------------------------------------------- the compiler

_COMPILER = {
    "counters": "torch._dynamo.utils:counters",
    "times": "torch._dynamo.utils:compilation_time_metrics",
    "tracing": "torch._dynamo.config:",
    "kernels": "torch._inductor.config:",
    "decompositions": "torch._inductor.decomposition:decompositions",
    "error": "torch._dynamo.exc:TorchDynamoException",
    "backend": "torch._dynamo:lookup_backend",
}


def compiler() -> Any:
    """What ``torch.compile`` counts and how it is set, by the names above; None where torch does not have all of it.
    ``torch.compiler`` has none of these, and ``torch.compile``'s ``options`` cannot say what is counted."""
    parts = {name: named(path) for name, path in _COMPILER.items()}
    return None if None in parts.values() else SimpleNamespace(**parts)


# ---------------------------------------------------------------------- process groups

_GROUPS = "torch.distributed.distributed_c10d"


def allow(timeout: timedelta) -> None:
    """Have every group of this process wait so long. ``init_process_group`` and ``new_group`` take a timeout for one
    group each, and DeepSpeed and device meshes pass none. torch from 2.14 on has ``set_timeout`` for one group."""
    world = named(f"{_GROUPS}:_world.pg_map")
    set_timeout = getattr(torch.distributed, "set_timeout", None) or named(f"{_GROUPS}:_set_pg_timeout")
    for group in list(world or ()) if set_timeout else ():
        set_timeout(timeout, group)
    if (store := shared_store()) is not None:
        store.set_timeout(timeout)  # NCCL connects at a group's first collective, through the store


def _of_groups() -> tuple[str, ...]:
    """The private names that ``allow`` and ``shared_store`` need of this torch."""
    public = hasattr(torch.distributed, "set_timeout")
    return ("_world.pg_map", "_get_default_store", *(() if public else ("_set_pg_timeout",)))


def shared_store() -> Any:
    """The store in which the ranks found one another; None where torch does not give it."""
    store = named(f"{_GROUPS}:_get_default_store")
    return None if store is None else store()


# ---------------------------------------------------------------------- the rest


def drawing_truncated() -> str:
    """The name in ``torch.nn.init`` of the function that draws for all ways to ``trunc_normal_``, "" if there is none.
    transformers and models keep ``trunc_normal_`` itself under names of their own."""
    name = "_no_grad_trunc_normal_"
    return name if hasattr(torch.nn.init, name) else ""


def float8_product(left: Any, right: Any, of_left: Any, of_right: Any, dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """``left`` (rows, in) times ``right`` (in, columns), both float8, with a scale each. ``scaled_mm`` does the same
    by another operator, whose operations torch 2.13.0 does not count."""
    product = getattr(torch, "_scaled_mm", None)
    if product is not None:
        return product(left, right, scale_a=of_left, scale_b=of_right, out_dtype=dtype, use_fast_accum=fast)
    kind = ScalingType.TensorWise
    return scaled_mm(left, right, of_left, kind, of_right, kind, output_dtype=dtype, use_fast_accum=fast)


def gpu_attention(name: str) -> Any:
    """An operator of attention that a GPU runs, "flash_attention", "efficient_attention" or "attention_math", to be
    traced with tensors of the host; ``scaled_dot_product_attention`` chooses by the device. Raises InputError where
    torch has no such operator."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None)
    if operator is None:
        raise InputError(f"torch {torch.__version__} has no operator of this kind of attention ({name}) to be traced")
    return operator


REPLACEMENTS = (
    Replacement(
        "torch", "ProcessGroupGloo.__init__", "two threads of a group free the same memory", "2.11 to 2.13",
        _two_threads_of_gloo, "init_process_group takes options for NCCL alone",
    ),
    Replacement(
        "torch", "TorchDispatchMode", "operators are counted, kept and moved as they are dispatched", "2.11 to 2.14",
        _sees, "TorchFunctionMode sees no backward",
        "no plan, selective checkpointing is full, models are drawn whole, verify counts by the profiler",
    ),
    Replacement(
        "torch", "Tensor._version", "a kept tensor that is changed in place is noticed", "2.11 to 2.14",
        lambda: "" if notices_changes() else "Tensor._version is not there",
        "none: autograd compares it itself", "changes in place are not noticed; prove copies gradients",
    ),
    Replacement(
        "torch", "FakeTensorMode", "a forward without values knows its shapes", "2.11 to 2.14",
        lambda: missing(f"{_FAKE}:FakeTensorMode", f"{_FAKE}:FakeTensor"),
        "the meta device has no answer where a model asks for values",
        "no plan; weights that no output depends on are found with values",
    ),
    Replacement(
        "torch", "torch._dynamo and torch._inductor", "settings and counts of torch.compile", "2.11 to 2.14",
        lambda: missing(*_COMPILER.values()), "torch.compiler has none of them", "blocks run uncompiled",
    ),
    Replacement(
        "torch", "timeouts and store of groups", "ranks wait for a checkpoint; a rank that hangs is named",
        "2.11 to 2.14",
        lambda: missing(*(f"{_GROUPS}:{one}" for one in _of_groups())),
        "a timeout for one group alone", "groups keep torch's limits, and run.hang_after looks at nothing",
    ),
    Replacement(
        "torch", "torch.nn.init._no_grad_trunc_normal_", "weights are drawn by part", "2.11 to 2.14",
        lambda: "" if drawing_truncated() else "_no_grad_trunc_normal_ is not there",
        "others keep trunc_normal_ under names of their own", "models are drawn whole",
    ),
    Replacement(
        "torch", "torch._scaled_mm", "products in float8", "2.11 to 2.14",
        lambda: missing("torch:_scaled_mm"), "scaled_mm: a plan counts no operations of it", "scaled_mm",
    ),
    Replacement(
        "torch", "a GPU's operators of attention", "a plan traces what a GPU saves", "2.11 to 2.14",
        lambda: missing(*(f"torch:ops.aten._scaled_dot_product_{one}" for one in ("flash_attention",
                                                                               "efficient_attention",
                                                                               "attention_math"))),
        "scaled_dot_product_attention chooses by the device", "no plan for a GPU",
    ),
)  # fmt: skip
