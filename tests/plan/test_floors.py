"""Candidates that are left out without a trace: what they are known to need at least is never more than they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import every_case
from plan.cells import LLAMA
from toolkit.planning.command import Request, make_plan
from toolkit.planning.floors import Floors

DEEP = LLAMA | {"num_hidden_layers": 24, "max_position_embeddings": 4096}


@every_case(("gpus", "adapter"), [(1, {}), (2, {}), (2, {"lora": 8}), (1, {"qlora": 8})])
def test_no_candidate_needs_less_than_its_floor(gpus: int, adapter: dict[str, int], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEP))
    plan = make_plan(Request(str(file), gpu="h100", gpus=gpus, every=True, cache=False, **adapter))
    floors, known = Floors(), 0
    for candidate in plan.candidates:
        live = floors.of(candidate.resolved)
        known += live > 0
        assert plan.search.least(candidate.resolved, live) <= candidate.needed, candidate.label
        floors.see(candidate)
    assert known > len(plan.candidates) / 2


def test_what_cannot_fit_is_not_traced_and_the_choice_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEP))
    request = Request(str(file), memory=1.6, gpus=2, lora=8, length=2048, micro=1, cache=False)
    fast = make_plan(request)
    assert fast.chosen is not None
    monkeypatch.setattr(Floors, "of", lambda self, resolved: 0)
    slow = make_plan(request)
    assert slow.chosen is not None
    assert fast.chosen.label == slow.chosen.label
    left_out = {c.label for c in slow.candidates} - {c.label for c in fast.candidates}
    assert left_out
    assert not any(c.fits for c in slow.candidates if c.label in left_out)
