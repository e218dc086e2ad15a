"""Every strategy and option, as if on a GPU: it trains, evaluates, saves, loads, and nothing is reported that has no
reason in ``allowed.py``."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.allowed import unexpected
from rehearsal.cells import Call, Cell, every_cell, quick_cells

_QUICK = {cell.name for cell in quick_cells()}
_HOST = ("offload-all",)


def _param(cell: Cell) -> Any:
    marks = [] if cell.name in _QUICK else [pytest.mark.nightly]
    return pytest.param(cell, Call("rehearse.rehearse", (cell,)), id=cell.name, marks=marks)


@pytest.mark.parametrize(("cell", "call"), [_param(cell) for cell in every_cell()])
def test_cell(stage: Any, cell: Cell, call: Call) -> None:
    outcome = stage(call)
    assert outcome.error is None, outcome.error
    assert outcome.refused is None
    assert unexpected(outcome.reports) == []
    # Each forward of packed rows looks whether a mask is needed; varlen makes none.
    masks = [report for report in outcome.reports if report.file.endswith("masking_utils.py")]
    if cell.option in ("packing", "varlen", "varlen-recomputed"):
        assert bool(masks) == (cell.option == "packing")
    assert len(outcome.losses) == 3
    assert outcome.skipped == [False] * 3
    assert all(ok for _, _, ok in outcome.claims), outcome.claims
    local = cell.rank % 8
    where = {device for _, _, device in outcome.local.values()}
    assert where == ({"cpu"} if cell.option in _HOST else {f"cuda:{local}"}), where
