"""Gathers and reductions as direct exchanges: what gloo gives, fewer copies, and used by every sharded strategy."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from cases import every_case
from toolkit.launch.group import WorkerGroup
from toolkit.strategies.engines.exchange import all_gather, exchanges, reduce_scatter, reduce_to_owners
from toolkit.strategies.engines.process_group import connect
from toolkit.verification.record.tracer import _Dispatched

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def gathered_job(dtype: torch.dtype) -> list[bool]:
    """Whether each of three gathers that are under way together gives what torch's gives."""
    connect("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert exchanges(None)
    equal, begun = [], []
    for number in range(3):
        draw = torch.Generator().manual_seed(10 * rank + number)
        mine = torch.randint(0, 100, (5, 3), generator=draw).to(dtype)
        right, found = (torch.zeros(size * 5, 3, dtype=dtype) for _ in range(2))
        dist.all_gather_single(right, mine)
        if number == 1:  # what is given may be a part of what is filled
            found[5 * rank : 5 * rank + 5] = mine
            mine = found[5 * rank : 5 * rank + 5]
        begun.append((all_gather(found, mine, async_op=True), found, right))
    for work, found, right in reversed(begun):
        assert isinstance(work, dist.Work)
        assert work.wait()
        equal.append(found.equal(right))
    return equal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_are_torchs(dtype: torch.dtype, group: WorkerGroup) -> None:
    assert group.run(gathered_job, dtype) == [[True] * 3] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_of_four_are_torchs(dtype: torch.dtype, four: WorkerGroup) -> None:
    assert four.run(gathered_job, dtype) == [[True] * 3] * 4


def reduced_job(dtype: torch.dtype, mean: bool, inside: bool) -> tuple[bool, bool]:
    """Whether the parts are those of a sum in the order of ranks, and whether torch's are the same bits.

    ``inside``: the sum is written over the rank's part of what is given, as DeepSpeed does."""
    connect("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    wholes = [torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    total = wholes[0].clone()
    for whole in wholes[1:]:
        total += whole
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    right, found = torch.empty(4, 3, dtype=dtype), torch.empty(4, 3, dtype=dtype)
    dist.reduce_scatter_single(right, wholes[rank].clone(), op=op)
    mine = slice(4 * rank, 4 * rank + 4)
    if inside:
        found = wholes[rank][mine]
    reduce_scatter(found, wholes[rank], op=op)
    if mean:
        total = total / size
    return found.equal(total[mine]), found.equal(right)


@every_case(
    ("dtype", "mean", "inside"), product((torch.float32, torch.bfloat16), (False, True), (False, True)), ids=str
)
def test_two_ranks_reduce_to_torchs_bits(dtype: torch.dtype, mean: bool, inside: bool, group: WorkerGroup) -> None:
    assert group.run(reduced_job, dtype, mean, inside) == [(True, True)] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_four_ranks_add_in_their_order(dtype: torch.dtype, mean: bool, inside: bool, four: WorkerGroup) -> None:
    assert all(ordered for ordered, _ in four.run(reduced_job, dtype, mean, inside))


def kept_job(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a rank's own pieces are the sum that torch's all-reduce gives to 16 bits' rounding, and whether all else
    is as it was. What one owner has in a row is divided by that owner alone."""
    connect("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    runs = [(size - 1, 700), *((owner, 100 + owner) for owner in range(size)), (0, 1)]
    whole = torch.randn(sum(numel for _, numel in runs), generator=torch.Generator().manual_seed(rank)).to(dtype)
    before, right = whole.clone(), whole.clone()
    dist.all_reduce(right)
    pieces = []
    for owner, numel in runs:
        pieces += [(owner, 1), (owner, numel - 1)] if owner == rank else [(owner, numel)]
    reduce_to_owners(whole, pieces)
    own, at = torch.zeros(whole.numel(), dtype=torch.bool), 0
    for owner, numel in runs:
        own[at : at + numel] = owner == rank
        at += numel
    tolerance = 0.0 if size == 2 else 8 * torch.finfo(dtype).eps  # another order of four terms
    equal = torch.allclose(whole[own], right[own], rtol=tolerance, atol=tolerance)
    return equal, whole[~own].equal(before[~own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owners_have_torchs_sums_and_nobody_elses(dtype: torch.dtype, group: WorkerGroup) -> None:
    assert group.run(kept_job, dtype) == [(True, True)] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_owners_among_four_have_torchs_sums(dtype: torch.dtype, four: WorkerGroup) -> None:
    assert four.run(kept_job, dtype) == [(True, True)] * 4


def refused_job() -> list[str]:
    connect("cpu")
    reasons = []
    for call in (
        lambda: all_gather(torch.empty(5), torch.empty(2)),
        lambda: all_gather(torch.empty(4), torch.empty(2, dtype=torch.bfloat16)),
        lambda: reduce_scatter(torch.empty(2), torch.empty(4), op=dist.ReduceOp.MAX),
        lambda: reduce_to_owners(torch.empty(4), [(0, 3)]),
        lambda: reduce_to_owners(torch.empty(4), [(0, 1), (2, 3)]),
    ):
        try:
            call()
        except ValueError as error:
            reasons.append(str(error))
    return reasons


def test_what_does_not_fit_is_refused_before_anything_is_sent(group: WorkerGroup) -> None:
    sizes, dtypes, op, pieces, owners = group.run(refused_job)[0]
    assert "5 torch.float32 for 2 parts of 2" in sizes
    assert "parts of 2 torch.bfloat16" in dtypes
    assert "MAX" in op
    assert pieces == "4 elements for pieces of [3]"
    assert owners == "owners [0, 2] in a group of 2"
    assert group.run(gathered_job, torch.float32) == [[True] * 3] * 2


def alone_job() -> tuple[str, float]:
    """A gather that rank 1 does not take part in, in a group whose limit is a second."""
    connect("cpu")
    limited = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), limited)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        return "", 0.0
    try:
        all_gather(torch.empty(4), torch.ones(2), limited)
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "no error", time.monotonic() - begun


@pytest.mark.usefixtures("launches")
def test_a_rank_that_does_not_answer_is_an_error_at_the_groups_limit() -> None:
    with WorkerGroup(2) as workers:
        (message, seconds), _ = workers.run(alone_job, timeout=60)
    assert "imed out" in message, message
    assert 0.9 < seconds < 60


def trained_job(strategy: str) -> dict[str, int]:
    """Elements of the largest tensor that each collective of a second step was given, by operator."""
    from benchmarks.floor.counting import during
    from benchmarks.floor.loops import Work, llama, toolkit

    sizes: dict[str, int] = {}

    def called(name: str, arguments: Sequence[Any]) -> None:
        tensors = [leaf for leaf in tree_leaves(list(arguments)) if isinstance(leaf, torch.Tensor)]
        sizes[name] = max([sizes.get(name, 0), *(tensor.numel() for tensor in tensors)])

    work = Work(llama(2, 64), length=16, processes=2, strategy={"name": strategy})
    toolkit(work, 2, during(1, _Dispatched(called)))
    return sizes


MOVED = {
    "zero1": ("all_gather_", "reduce_scatter_pieces_"),
    "zero2": ("all_gather_", "reduce_scatter_pieces_"),
    "zero3": ("all_gather_", "reduce_scatter_"),
    "fsdp1": ("all_gather_",),
    "fsdp2": ("all_gather_", "reduce_scatter_"),
}


INSTEAD = {"all_gather_": "all_gather_", "reduce_scatter_": "reduce_scatter_", "reduce_scatter_pieces_": "allreduce_"}
"""What gloo would do in its place."""


@every_case("name", MOVED)
def test_every_sharded_strategy_moves_its_weights_so(name: str, group: WorkerGroup) -> None:
    sizes = group.run(trained_job, name, timeout=120)[0]
    for operator in MOVED[name]:
        ours = [size for op, size in sizes.items() if op.startswith(f"toolkit::{operator}")]
        gloos = [size for op, size in sizes.items() if op.startswith("c10d::") and _same(INSTEAD[operator], op)]
        assert max(ours, default=0) > 1000, sizes
        assert max(gloos, default=0) < 1000, sizes


def _same(operator: str, name: str) -> bool:
    return operator.replace("_", "") in name.replace("_", "")
