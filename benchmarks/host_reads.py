"""Finds, without a GPU, what would make the host wait for one: every value that is read from a tensor, every tensor
whose size depends on values, and every copy that does not say that it need not be waited for."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_evidence.syncs import asked_by, place

_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal",
          "unique_consecutive"}  # fmt: skip
_INDEXED, _MASKS = {"index", "index_put", "index_put_"}, {torch.bool, torch.uint8}
_LISTS = {"tolist", "numpy", "__array__", "cpu", "storage"}


class HostReads:
    """``lines``: who asked, as ``file:line``, and for what."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, str]] = Counter()

    def note(self, what: str) -> None:
        self.lines[asked_by(traceback.extract_stack(), __file__), what] += 1

    def of(self, package: str) -> dict[str, list[str]]:
        """What the files of a package asked for, by file."""
        found: dict[str, list[str]] = {}
        for line, what in sorted(self.lines):
            file = line.rpartition(":")[0]
            if file.startswith(package):
                found.setdefault(file, []).append(what)
        return found

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with _Calls(self), _Operators(self):
            yield


class _Operators(TorchDispatchMode):
    """Operators whose answer the host has to know; whoever calls them, C++ included."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.removeprefix("aten::")) in _READS:
            self.reads.note(name)
        elif name in _INDEXED and any(getattr(index, "dtype", None) in _MASKS for index in args[1]):
            self.reads.note("index by a mask")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Calls from Python that copy: lists of values, tensors made from Python's numbers on a device, and ``to`` a device
    without ``non_blocking``."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _LISTS:
            self.reads.note(name)
        elif name in ("tensor", "as_tensor", "new_tensor") and kwargs.get("device") is not None:
            self.reads.note(f"{name} on a device")
        elif name == "to" and _waits(args[1:], kwargs) and not _torchs(sys._getframe(1)):
            # torch's own go from a device to the same one, which copies nothing (the norms of clipping).
            self.reads.note("to a device, waited for")
        return func(*args, **kwargs)


def _waits(args: Any, kwargs: Any) -> bool:
    there = "device" in kwargs or any(isinstance(arg, torch.device | str) for arg in args)
    return there and not kwargs.get("non_blocking") and True not in args[1:]


def _torchs(frame: Any) -> bool:
    return place(frame.f_code.co_filename).startswith("torch/")
