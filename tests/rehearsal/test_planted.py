"""Each kind of report is made of a planted defect, at the line that has it, and by no line without one."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.allowed import unexpected
from rehearsal.cells import Call, Cell
from rehearsal.plants import PLANTS
from rehearsal.watch import KINDS

_CELL = Cell("ddp", rank=7)
_DEFECTS = Call("rehearse.with_defects", (_CELL,))


@pytest.mark.parametrize("name", PLANTS)
def test_a_defect_is_reported(stage: Any, name: str) -> None:
    outcome = stage(_DEFECTS)
    assert outcome.error is None
    kind, _ = PLANTS[name]
    found = {(report.kind, report.file, report.function) for report in unexpected(outcome.planted[name])}
    assert (kind, "toolkit/training/loop.py", "forward") in found, found


def test_and_nothing_is_without_one(stage: Any) -> None:
    outcome = stage(Call("rehearse.brief", (_CELL,)))
    assert outcome.error is None
    assert outcome.planted == {}
    assert unexpected(outcome.reports) == []


def test_every_kind_is_planted() -> None:
    assert {kind for kind, _ in PLANTS.values()} == set(KINDS)
