"""What a save copies: each rank its own pieces, to its host, once; nothing is gathered."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.cells import Call, Cell, quick_cells

_CELLS = [c for c in quick_cells() if c.option == "plain" and c.trained == "full"]
"""The first rank in bf16 and the last in fp16, of every strategy."""
_MODEL = 300 * 64 * 2 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
"""Elements of the cells' model: 112,448."""


@pytest.mark.parametrize("cell", [pytest.param(c, id=c.name) for c in _CELLS])
def test_a_rank_copies_its_pieces_once_and_gathers_nothing(stage: Any, cell: Cell) -> None:
    outcome = stage(Call("rehearse.rehearse", (cell,)))
    assert outcome.error is None, outcome.error
    saved = outcome.counts["save"]
    copied, whole, tensors = saved.to_host + saved.on_host, 3 * _MODEL, len(outcome.local)  # weights and two moments
    # Scalars may be read: whether there is a step, how many were taken, and whether each rank could write.
    scalars = 2 * tensors + 3 * cell.world
    if cell.world == 1:
        assert whole <= copied <= whole + scalars
    else:
        # Rows are dealt out in equal chunks, of which the last ranks may have none.
        assert 0 < copied <= 1.5 * whole / cell.world + scalars
    assert saved.received <= scalars


def test_bench_limits_the_memory_of_its_own_device(stage: Any) -> None:
    limits = stage(Call("bench_job.limited", (Cell("ddp", rank=3), 0.5)))
    assert limits == [(3, 0.5), (3, 1.0)]
