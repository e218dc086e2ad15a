"""Counts every operator that torch dispatches, backward included: operators, bytes allocated and copied, bytes on the
wire. Counts do not depend on the load of the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = frozenset({"copy_", "_to_copy", "clone", "_foreach_copy_"})
"""Operators that do nothing but copy."""


_FEW = 256
"""Bytes of counts, flags and norms that ranks add up once per step: not traffic of the sharding."""


@dataclass
class Counts:
    """Bytes are those of one process."""

    operators: int = 0
    allocated: int = 0
    """Bytes of every storage that an operator made."""
    copied: int = 0
    """Bytes that operators wrote which only copy or cast."""
    sent: float = 0.0
    """Bytes that this process sends in collectives over a ring, those of at most `_FEW` bytes left out."""
    names: Counter[str] = field(default_factory=Counter)
    """Operators by name, to find which ones differ."""


def during(step: int, context: AbstractContextManager[Any]) -> Callable[[], None]:
    """An ``after`` for the loops: ``context`` is entered when ``step`` optimizer steps have ended, and left one step
    later. What making the model and the first steps do (the optimizer's state, cached masks) stays outside."""
    ended = 0

    def after() -> None:
        nonlocal ended
        ended += 1
        if ended == step:
            context.__enter__()
        elif ended == step + 1:
            context.__exit__(None, None, None)

    return after


class Counting(TorchDispatchMode):
    """Counts into ``now`` while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional", "toolkit"):
            found = func(*args, **kwargs)
            self.now.sent += _sent(name, args)
            return found
        before = {_storage(t) for t in _tensors((args, kwargs))}
        found = func(*args, **kwargs)
        self.now.operators += 1
        self.now.names[name] += 1
        made = {_storage(t): t for t in _tensors(found)}
        for storage, tensor in made.items():
            if storage not in before:
                self.now.allocated += tensor.untyped_storage().nbytes()
        if name in _COPIES:
            written = _tensors(args[0] if name.endswith("copy_") else found)
            self.now.copied += sum(t.numel() * t.element_size() for t in written)
        return found


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _sent(name: str, args: Any) -> float:
    """Bytes that a rank sends: a ring of N ranks sends (N-1)/N of a tensor for an all-gather, a reduce-scatter and an
    all-to-all, twice that for an all-reduce (Patarasuk and Yuan 2009), and a broadcast sends the tensor once.

    Raises AssertionError for a collective that it does not know.
    """
    ranks = dist.get_world_size()
    ring = (ranks - 1) / ranks
    plain = name.replace("_", "")
    if "barrier" in plain or plain.startswith(("wait", "monitored")):
        return 0.0
    # The whole tensors: what a gather writes, what a reduction reads.
    first, second = (sum(t.numel() * t.element_size() for t in _tensors(args[at])) for at in (0, 1))
    size = max(first, second)
    if size <= _FEW:
        return 0.0
    if "allreduce" in plain:
        return 2 * ring * size
    if "broadcast" in plain:
        return float(size) * ring
    if any(kind in plain for kind in ("allgather", "reducescatter", "alltoall")):
        return ring * size
    raise AssertionError(f"how much does {name} send?")
