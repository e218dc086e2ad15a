"""All-gathers and reduce-scatters between processes without a GPU: each sends its parts straight to the others.

torch 2.13.0's gloo gathers into a buffer of its own and copies out of it, and reduces to parts by an all-reduce of a
copy (ProcessGroupGloo.cpp, ``_allgather_base``, ``_reduce_scatter_base``).
"""

from __future__ import annotations

import datetime
import functools
import itertools
import operator
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


def reduce_to_owners(whole: torch.Tensor, pieces: Sequence[tuple[int, int]], group: Any = None) -> None:
    """Add every rank's ``whole`` up, each piece on the rank that owns it alone, in place. Elsewhere a piece keeps the
    rank's own values.

    ``pieces``: of each in turn its owner's rank in ``group`` and its elements; together they are ``whole``, contiguous
    and on the CPU. Ranks may divide what one owner has in a row into other pieces. Memory is taken for as much as this
    rank owns. To its own values a rank adds those of the others in their order, in ``whole``'s dtype. Raises ValueError
    where the pieces do not fit, and RuntimeError as ``all_gather``.
    """
    group = group or dist.group.WORLD
    runs = [(owner, list(run)) for owner, run in itertools.groupby(pieces, key=operator.itemgetter(0))]
    owners, sizes = [owner for owner, _ in runs], [sum(size for _, size in run) for _, run in runs]
    if sum(sizes) != whole.numel():
        raise ValueError(f"{whole.numel()} elements for pieces of {sizes}")
    if not set(owners) <= set(range(group.size())):
        raise ValueError(f"owners {sorted(set(owners))} in a group of {group.size()}")
    mine = sum(size for owner, size in zip(owners, sizes, strict=True) if owner == group.rank())
    come = whole.new_empty(mine)  # as for ``reduce_scatter``
    _operators().reduce_scatter_pieces_(whole, owners, sizes, come, group.boxed())


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
    pieces = f"(Tensor(a!) whole, int[] owners, int[] sizes, Tensor(b!) come, {group}) -> ()"
    for name, schema, act in (
        ("all_gather_", gathers, _gather),
        ("reduce_scatter_pieces_", pieces, _reduce_pieces),
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


def _reduce_pieces(
    whole: torch.Tensor, owners: Sequence[int], sizes: Sequence[int], come: torch.Tensor, boxed: Any
) -> None:
    group = dist.ProcessGroup.unbox(boxed)
    rank, limit = group.rank(), _limit(group)
    pieces = list(zip(owners, whole.view(-1).split_with_sizes(list(sizes)), strict=True))
    mine = [piece for owner, piece in pieces if owner == rank]
    room = come.split_with_sizes([piece.numel() for piece in mine])
    sent = [group.send([piece], owner, _TAG) for owner, piece in pieces if owner != rank]
    for source in (other for other in range(group.size()) if other != rank):
        # One rank's after another's: a rank may own all of ``whole``.
        arriving = [group.recv([one], source, _TAG) for one in room]
        for message, piece, one in zip(arriving, mine, room, strict=True):
            message.wait(limit)
            piece.add_(one)
    for message in sent:
        message.wait(limit)


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
    number = next(_NUMBERS)
    _BEGUN[number] = Exchange(messages, _limit(group), (*go, *come), then)
    return number


def _limit(group: dist.ProcessGroup) -> datetime.timedelta:
    """How long a message may take."""
    limit: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit
