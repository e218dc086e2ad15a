"""Sees every operator of a rank, below autograd and above the fake tensors, and reports what a GPU would not take, or
what would make its host wait."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_evidence.syncs import place
from rehearsal import device, groups
from rehearsal.kernels import runs_on_cuda
from rehearsal.known import PLAIN, Known, device_of, tensors_in

CPU_IN_NCCL, DEVICES, COPY, KERNEL, READ = "cpu-in-nccl", "two-devices", "blocking-copy", "no-kernel", "host-read"
KINDS = (CPU_IN_NCCL, DEVICES, COPY, KERNEL, READ)

_READS = frozenset({"_local_scalar_dense", "equal"})
_SIZED = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"})
"""Their result's size depends on values."""
_ACROSS = frozenset({"copy_", "_to_copy", "_foreach_copy_", "set_", "index", "index_put", "index_put_",
                     "_index_put_impl_", "is_same_size", "_has_same_storage_numel"})  # fmt: skip
"""Take tensors of two devices. Indices may be on the host, and are then copied."""
_BETWEEN = frozenset({"torch", "contextlib.py", "threading.py", "functools.py"})


@dataclass(frozen=True)
class Report:
    """One thing seen: ``file`` and ``function`` asked for it (the innermost that are not torch's)."""

    kind: str
    what: str
    stage: str
    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} ({self.file}:{self.line} in {self.function}; {self.stage})"


@dataclass
class Counts:
    """Work of one stage: operators dispatched, collectives by name, elements that gathers and broadcasts gave."""

    operators: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    received: int = 0
    to_host: int = 0
    """Elements copied from the device to the host."""
    on_host: int = 0
    """Elements copied from the host to the host."""


class Watch(TorchDispatchMode):
    """``reports``: what was seen, how often. ``stage`` is set by who runs the rank."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known
        self.stage = "start"
        self.reports: Counter[Report] = Counter()
        self.counts: dict[str, Counts] = {}
        device.waited = self._waited

    def report(self, kind: str, what: str) -> None:
        self.reports[Report(kind, what, self.stage, *_asked_by())] += 1

    def _waited(self, what: str) -> None:
        """Who calls it is who waits, torch too: FSDP1 does."""
        frame = sys._getframe(2)
        file, line = place(frame.f_code.co_filename), frame.f_lineno
        if file.startswith("torch/distributed/"):
            report = Report(READ, f"torch.cuda {what}", self.stage, file, frame.f_code.co_name, line)
            self.reports[report] += 1
        else:
            self.report(READ, f"torch.cuda {what}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        if not set(types) <= set(PLAIN):
            return NotImplemented  # a DTensor: its local tensors come by themselves
        if _composite(func):
            # Some states of autograd hand these over whole: what they are made of is what a device sees.
            with self:
                return func.decompose(*args, **kwargs)
        space, _, name = func._schema.name.partition("::")
        inputs = tensors_in(args, kwargs)
        counts = self.counts.setdefault(self.stage, Counts())
        counts.operators += 1
        if space in ("c10d", "_c10d_functional"):
            return self._collective(func, name, args, kwargs, inputs, counts)
        devices = [device_of(t) for t in inputs]
        on_cuda = any(d.type == "cuda" for d in devices)
        if on_cuda:
            if len(set(devices)) > 1:
                self._devices(func, name, inputs)
            if not _runs_on_cuda(func):
                self.report(KERNEL, f"{func} has no kernel for CUDA")
        if name in ("_to_copy", "copy_") and inputs:
            self._copy(name, args, kwargs, counts)
        if name == "clone" and not on_cuda:
            counts.on_host += inputs[0].numel()
        if name in _READS and inputs:
            if on_cuda:
                self.report(READ, name)
            with torch._C._DisableTorchDispatch():
                return self.known.read(func, inputs[0])
        if self._sized(func, name, args, inputs):
            return self._of_known_size(func, args, kwargs, on_cuda)
        answer = self._run(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            self.known.follow(func, args, kwargs, answer)
        return answer

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Shapes, dtypes and devices are torch's own to check, in the operator's meta function."""
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.report(READ, f"{func}: depends on values")
            raise
        except NotImplementedError as error:
            self.report(KERNEL, f"{func}: {_first_line(error)}")
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            kind = DEVICES if "different devices" in str(error) else KERNEL
            self.report(kind, f"{func}: {_first_line(error)}")
            raise

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor],
                    counts: Counts) -> Any:  # fmt: skip
        served = groups.devices_of(args)
        strangers = {device_of(t).type for t in inputs if t.numel()} - (served or {"cuda"})
        if name != "wait_tensor":
            counts.collectives[name] += 1
            if strangers:
                self.report(CPU_IN_NCCL, f"{func}: a {', '.join(sorted(strangers))} tensor, its group has NCCL alone")
        answer = self._run(func, args, kwargs)
        if "gather" in name or "broadcast" in name:
            outputs = args[0] if func._schema.name.startswith("c10d::") else answer
            counts.received += sum(t.numel() for t in tensors_in((outputs,)))
        if func._schema.name.startswith("c10d::"):
            with torch._C._DisableTorchDispatch():
                groups.follow(self.known, func._schema.name, args)
        return answer

    def _devices(self, func: Any, name: str, inputs: list[torch.Tensor]) -> None:
        # A tensor without dimensions on the host is a number to an operator, but not to one over lists of tensors.
        listed = name.startswith(("_foreach", "_fused"))
        others = {str(device_of(t)) for t in inputs if t.dim() or listed or device_of(t).type == "cuda"}
        if len(others) > 1 and name not in _ACROSS:
            self.report(DEVICES, f"{func}: {', '.join(sorted(others))}")

    def _copy(self, name: str, args: Any, kwargs: Any, counts: Counts) -> None:
        if name == "copy_":
            target, source = args[0], args[1]
            there, waits = device_of(target).type, not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            pinned = device.is_pinned(target) if there == "cpu" else True
        else:
            source, to = args[0], kwargs.get("device")
            there = device_of(source).type if to is None else torch.device(to).type
            waits = not kwargs.get("non_blocking", False)
            pinned = True  # what is made on the host for a copy that does not wait is page-locked
        here = device_of(source).type
        if here == there or "meta" in (here, there):
            return
        if there == "cpu":
            counts.to_host += source.numel()
        if here == "cpu":
            pinned = device.is_pinned(source)
        if waits or not pinned:
            why = "" if waits else ", from or to memory that is not pinned"
            self.report(COPY, f"{here} to {there}{why}")

    def _sized(self, func: Any, name: str, args: Any, inputs: list[torch.Tensor]) -> bool:
        if name == "index":
            return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return name in _SIZED and not (name == "repeat_interleave" and func._overloadname != "Tensor")

    def _of_known_size(self, func: Any, args: Any, kwargs: Any, on_cuda: bool) -> Any:
        """A result whose size depends on values: of that size where they are known."""
        if on_cuda:
            self.report(READ, f"{func}: its size depends on values")
        inputs = tensors_in(args, kwargs)
        if any(self.known.of(t) is None for t in inputs):
            return self._run(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            computed = self.known.compute(func, args, kwargs)
        single = isinstance(computed, torch.Tensor)
        made = []
        for values in [computed] if single else computed:
            fake = torch.empty(values.shape, dtype=values.dtype, device=device_of(inputs[0]))
            self.known.set(fake, values)
            made.append(fake)
        return made[0] if single else tuple(made)


def _asked_by() -> tuple[str, str, int]:
    """File, function and line: of the innermost that are not torch's; within autograd's thread of torch.distributed."""
    torchs = "?", "?", 0
    frame: Any = sys._getframe(2)
    while frame is not None:
        file, here = place(frame.f_code.co_filename), (frame.f_code.co_name, frame.f_lineno)
        if file.split("/", maxsplit=1)[0] not in _BETWEEN and "tests/rehearsal/" not in frame.f_code.co_filename:
            return file, *here
        if torchs[0] == "?" and file.startswith("torch/distributed/"):
            torchs = file, *here
        frame = frame.f_back
    return torchs


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0][:300]


@functools.cache
def _composite(func: Any) -> bool:
    return func._schema.name.startswith("aten::") and bool(func._can_decompose())


_runs_on_cuda = functools.cache(runs_on_cuda)
