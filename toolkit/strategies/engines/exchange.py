"""All-gathers and reduce-scatters between processes without a GPU: each sends its parts straight to the others.

torch 2.13.0's gloo gathers into a buffer of its own and copies out of it, and reduces to parts by an all-reduce of a
copy (ProcessGroupGloo.cpp, ``_allgather_base``, ``_reduce_scatter_base``).
"""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_TAG = 20_257
"""Keeps these messages apart from those that pipeline stages send in the same group."""

SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
"""What ``reduce_scatter`` can do."""


def exchanges(group: Any) -> bool:
    """Whether ``group`` (None: all processes) is one that gains: several processes that gloo connects."""
    return dist.get_world_size(group) > 1 and dist.get_backend(group) == "gloo"


def all_gather(output: torch.Tensor, mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Exchange | None:
    """Fill ``output`` with every rank's ``mine``, in the order of ranks; ``mine`` may be its part of ``output``.

    Both are contiguous and on the CPU; ``output`` has as many elements as every rank's ``mine``, all of one size and
    dtype. With ``async_op`` they are not to be touched until ``wait`` has returned. Raises ValueError where sizes or
    dtypes do not fit, and RuntimeError where a rank has gone or does not answer within the group's time limit.
    """
    group = group or dist.group.WORLD
    _check(output, mine, group)
    return _begun(_operators().all_gather_(output, mine, group.boxed()), async_op)


def reduce_scatter(
    output: torch.Tensor, whole: torch.Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> Exchange | None:
    """Fill ``output`` with this rank's part of the sum, or average, of every rank's ``whole``: ``op`` is SUM or AVG.

    ``output`` may be this rank's part of ``whole``. As ``all_gather``, but for the parts of the other ranks memory is
    taken: as much as ``whole`` less a part. They are added in the order of ranks, in ``whole``'s dtype. Raises
    ValueError for another ``op``, sizes that do not fit, and a group of one.
    """
    if op not in SUMS:
        raise ValueError(f"op: {op} is neither SUM nor AVG")
    group = group or dist.group.WORLD
    _check(whole, output, group)
    if group.size() == 1:
        raise ValueError("there is nothing to add up in a group of one")
    act = _operators().reduce_scatter_ if op == dist.ReduceOp.SUM else _operators().reduce_scatter_mean_
    # Made here, not in the operator, where who counts memory by what is dispatched would not see it.
    come = whole.new_empty(whole.numel() - output.numel())
    return _begun(act(output, whole, come, group.boxed()), async_op)


class Exchange(dist.Work):
    """Messages on their way. When ``wait`` returns, all have arrived and what is made of them is there.

    For Python alone to wait for: if C++ held the last reference, torch would lose what this class adds to Work."""

    def __init__(
        self,
        messages: Sequence[dist.Work],
        limit: datetime.timedelta,
        holds: Sequence[torch.Tensor],
        then: Callable[[], Any] | None,
    ) -> None:
        super().__init__()
        self._messages, self._limit, self._holds, self._then = messages, limit, holds, then

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for message in self._messages:
            message.wait(timeout or self._limit)
        if self._then is not None:
            self._then()
        self._messages, self._holds, self._then = (), (), None
        return True


_BEGUN: dict[int, Exchange] = {}
_NUMBERS = itertools.count()


def _check(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    if whole.numel() != part.numel() * group.size() or whole.dtype != part.dtype:
        raise ValueError(f"{whole.numel()} {whole.dtype} for {group.size()} parts of {part.numel()} {part.dtype}")


def _begun(number: int, async_op: bool) -> Exchange | None:
    exchange = _BEGUN.pop(number)
    if async_op:
        return exchange
    exchange.wait()
    return None


@functools.cache
def _operators() -> Any:
    """Each as one operator of torch, so that who counts what is dispatched counts a gather, as with gloo's own. An
    operator cannot return an `Exchange`; it returns the number of one in `_BEGUN`."""
    group = "__torch__.torch.classes.c10d.ProcessGroup group"
    gathers = f"(Tensor(a!) output, Tensor mine, {group}) -> int"
    reduces = f"(Tensor(a!) output, Tensor whole, Tensor(b!) come, {group}) -> int"
    for name, schema, act in (
        ("all_gather_", gathers, _gather),
        ("reduce_scatter_", reduces, functools.partial(_reduce, mean=False)),
        ("reduce_scatter_mean_", reduces, functools.partial(_reduce, mean=True)),
    ):
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, act, "CPU")
    return torch.ops.toolkit


_LIBRARY = torch.library.Library("toolkit", "FRAGMENT")


def _gather(output: torch.Tensor, mine: torch.Tensor, boxed: Any) -> int:
    group = dist.ProcessGroup.unbox(boxed)
    parts = _parts(output, group.size())
    own = parts[group.rank()]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine.view(-1))
    return _exchange(group, [own] * group.size(), parts)


def _reduce(output: torch.Tensor, whole: torch.Tensor, come: torch.Tensor, boxed: Any, mean: bool) -> int:
    group = dist.ProcessGroup.unbox(boxed)
    rank, size = group.rank(), group.size()
    parts = _parts(whole, size)
    terms = _parts(come, size - 1)
    terms.insert(rank, parts[rank])

    def add() -> None:
        # ``output`` may be this rank's part of ``whole``: nothing is written to it before that has been added.
        total = output.view(-1)
        if rank > 1:
            for term in terms[1:]:
                terms[0].add_(term)
            total.copy_(terms[0])
        else:
            torch.add(terms[0], terms[1], out=total)
            for term in terms[2:]:
                total.add_(term)
        if mean:
            total.div_(size)

    return _exchange(group, parts, terms, add)


def _parts(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Views of its equal parts."""
    return list(whole.view(-1).tensor_split(count)) if count else []


def _exchange(
    group: dist.ProcessGroup,
    go: Sequence[torch.Tensor],
    come: Sequence[torch.Tensor],
    then: Callable[[], Any] | None = None,
) -> int:
    """Send every other rank its part of ``go`` and receive its own into ``come``; no two ranks begin with the same."""
    rank, size = group.rank(), group.size()
    messages = []
    for apart in range(1, size):
        to, source = (rank + apart) % size, (rank - apart) % size
        messages.append(group.recv([come[source]], source, _TAG))
        messages.append(group.send([go[to]], to, _TAG))
    limit = group._get_backend(torch.device("cpu")).options._timeout
    number = next(_NUMBERS)
    _BEGUN[number] = Exchange(messages, limit, (*go, *come), then)
    return number
