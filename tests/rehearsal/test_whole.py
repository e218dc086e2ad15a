"""What a save copies: tensors go to the host of rank 0 once, and to no other."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.cells import Call, Cell, quick_cells

_WHOLE = ("full", "bf16")
"""What trains, and its precision, in the cells whose saved elements are counted."""
_WRITING = [c for c in quick_cells() if c.rank == 0 and c.option == "plain" and (c.trained, c.precision) == _WHOLE]
_OTHERS = [c for c in quick_cells() if c.rank and c.option == "plain" and c.trained != "qlora"]
_MODEL = 300 * 64 * 2 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
"""Elements of the cells' model: 112,448."""


@pytest.mark.parametrize("cell", [pytest.param(c, id=c.name) for c in _OTHERS])
def test_a_rank_that_writes_nothing_copies_nothing(stage: Any, cell: Cell) -> None:
    outcome = stage(Call("rehearse.rehearse", (cell,)))
    assert outcome.error is None, outcome.error
    # Scalars may be read: whether there is a step, and how many were taken.
    assert outcome.counts["save"].to_host <= 2 * len(outcome.local)


@pytest.mark.parametrize("cell", [pytest.param(c, id=c.name) for c in _WRITING])
def test_the_one_that_writes_copies_each_tensor_once(stage: Any, cell: Cell) -> None:
    outcome = stage(Call("rehearse.rehearse", (cell,)))
    saved = outcome.counts["save"]
    whole = 3 * _MODEL  # weights and two moments
    assert whole <= saved.to_host + saved.on_host <= whole + 2 * len(outcome.local)


@pytest.mark.parametrize("cell", [pytest.param(c, id=c.name) for c in _WRITING if c.strategy == "fsdp1"])
def test_no_more_is_gathered_than_there_is(stage: Any, cell: Cell) -> None:
    outcome = stage(Call("rehearse.rehearse", (cell,)))
    world, tensors = cell.world, 3 * len(outcome.local)
    assert outcome.counts["save"].received <= 3 * _MODEL + world * tensors


def test_bench_limits_the_memory_of_its_own_device(stage: Any) -> None:
    limits = stage(Call("bench_job.limited", (Cell("ddp", rank=3), 0.5)))
    assert limits == [(3, 0.5), (3, 1.0)]
