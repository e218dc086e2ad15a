"""`plan` of rows whose tokens are divided over ranks: bytes on the wire; memory is in the matrix (plan/cells.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plan.cells import DIVIDED, Cell
from plan.test_layers import added_job
from plan.truth import predicted, resolved_from
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.hardware import device_named
from toolkit.planning.predict import Planner
from toolkit.planning.search import Search
from toolkit.planning.time import Rates, exchanged
from toolkit.strategies import resolve

CASES = [DIVIDED[6], DIVIDED[1], replace(DIVIDED[1], checkpointing="selective"), replace(DIVIDED[9], micro=1)]


def exchanged_job(recipe: dict[str, Any], length: int) -> float:
    """What a rank sends to the others that divide its rows, in one micro-batch of a real step, in bytes."""
    from toolkit.model import context
    from toolkit.planning.measure import measure

    right, sizes = context.all_to_all, []

    def counted(sent: torch.Tensor, group: Any) -> torch.Tensor:
        sizes.append(sent.numel() * sent.element_size() * (group.size() - 1) / group.size())
        return right(sent, group)

    context.all_to_all = counted
    try:
        measure(resolved_from(recipe), length, steps=1, track=False)
    finally:
        context.all_to_all = right
    return sum(sizes) / recipe["batch"]["accumulation"]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("cell", CASES, ids=lambda cell: cell.name)
def test_bytes_on_the_wire_are_those_of_a_real_step(cell: Cell, group: WorkerGroup) -> None:
    """Query, key, value and output, there and back; once more where blocks recompute their activations."""
    resolved = resolved_from(cell.recipe())
    planner = Planner.of(resolved, cell.length)
    [sent] = exchanged(planner.segments_of(resolved), list(planner.skeleton.holdings.order), resolved.mesh)
    assert sent.size == group.run(exchanged_job, cell.recipe(), cell.length)[0] > 0


@pytest.mark.nightly
def test_bytes_of_rows_and_layers_both_divided_are_those_of_a_real_step(four: WorkerGroup) -> None:
    cell = replace(DIVIDED[1], strategy="fsdp2", tensor=True)
    resolved = resolved_from(cell.recipe())
    planner = Planner.of(resolved, cell.length)
    found = exchanged(planner.segments_of(resolved), list(planner.skeleton.holdings.order), resolved.mesh)
    counted = (four.run(job, cell.recipe(), cell.length)[0] for job in (exchanged_job, added_job))
    assert {sent.axis: sent.size for sent in found} == dict(zip(("context", "tensor"), counted, strict=True))
    assert all(sent.size for sent in found)


def test_half_of_each_row_takes_less_memory_than_all_of_it() -> None:
    """Of the same model and rows: what grows with tokens is divided, what does not is not."""
    parts = DIVIDED[0]
    whole = replace(parts, context=False)
    state = predicted(replace(whole, length=2, micro=1))
    assert predicted(parts) - state == pytest.approx((predicted(whole) - state) / 2, rel=0.1)


@pytest.mark.nightly
def test_other_strategies_are_planned_with_rows_divided_alike() -> None:
    recipe = DIVIDED[6].recipe() | {"machine": {"device": "cuda", "processes": 4}}
    recipe["strategy"]["mesh"] = {"context": 2, "shard": 2}
    from toolkit.recipe.schema import Recipe

    asked = resolve(Recipe.model_validate(recipe), "recipe", device="cuda")
    found = Search(asked, device_named("h100", None), 0.1, Rates()).all(every=True)
    assert {one.resolved.mesh.context for one in found} == {2}
    assert {"ddp", "zero3", "fsdp2"} <= {one.resolved.recipe.strategy.name for one in found}
    own = next(one for one in found if one.asked)
    assert "context 2" in own.label
    assert own.sent["context"] > 0
    assert own.seconds is not None
    assert own.seconds.exposed > 0


def test_only_the_toolkits_loop_divides_rows() -> None:
    from toolkit.planning.loops import check_loop

    with pytest.raises(InputError, match=r"does not divide rows; plan it without strategy\.mesh\.context"):
        check_loop("trainer", resolved_from(DIVIDED[6].recipe()))
