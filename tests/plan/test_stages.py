"""`plan` of stages of blocks: time, bytes between neighbours, and what each stage has; memory is in the matrix
(plan/cells.py)."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import every_case
from plan.cells import STAGED, Cell
from plan.truth import predicted, resolved_from
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.command import Request, plan_command
from toolkit.planning.hardware import device_named
from toolkit.planning.loops import check_loop
from toolkit.planning.predict import Planner
from toolkit.planning.search import Search
from toolkit.planning.stages import step_length
from toolkit.planning.time import Rates
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of


@every_case(("stages", "micros"), [(1, 4), (2, 1), (2, 8), (4, 2), (4, 8), (8, 64)])
def test_bubble_of_equal_stages(stages: int, micros: int) -> None:
    """Narayanan et al., arXiv:2104.04473, section 2.2: the bubble is (p - 1)(forward + backward)."""
    took = step_length([1.0] * stages, [2.0] * stages, 0.0, micros)
    assert took == pytest.approx((micros + stages - 1) * 3.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    took = step_length([1.0, 1.0, 1.5], [2.0, 2.0, 3.0], 0.0, 10)
    assert took == pytest.approx(10 * 4.5 + 2 * 3.0)


def test_latency_of_the_links_counts_in_both_directions() -> None:
    assert step_length([1.0, 1.0], [2.0, 2.0], 0.25, 1) == pytest.approx(6.5)


def sent_job(recipe: dict[str, Any], length: int) -> tuple[int, int]:
    """Bytes that this rank sends to its neighbours in one real step, and the most tensors that it kept after sending
    them."""
    from toolkit.planning.measure import measure
    from toolkit.strategies.engines import link

    right, receive, sizes, kept = link._send, link.Link.receive_gradient, [], [0]

    def received(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        gradient = receive(self, hidden)
        kept.append(len(self._hidden))
        return gradient

    link.Link.receive_gradient = received

    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        if tensor.dim() > 1:  # not what tells the dtype
            sizes.append(tensor.nbytes)
        return right(tensor, *args)

    link._send = counted
    try:
        measure(resolved_from(recipe), length, steps=1, track=False)
    finally:
        link._send, link.Link.receive_gradient = right, receive
    return sum(sizes), max(kept)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "cell", [STAGED[0], STAGED[3], replace(STAGED[0], precision="bf16-pure")], ids=lambda c: c.name
)
def test_bytes_between_neighbours_are_those_of_a_real_step(cell: Cell, group: WorkerGroup) -> None:
    resolved = resolved_from(cell.recipe())
    stages = [stage for stage, _ in Planner.of(resolved, cell.length).by_stage(resolved)]
    found = group.run(sent_job, cell.recipe(), cell.length)
    assert [stage.sent(resolved.accumulation) for stage in stages] == [size for size, _ in found]
    assert [kept for _, kept in found] == [1, 0], "when its gradient is back, what was sent is let go of"


def test_stages_have_the_model_between_them() -> None:
    """Every weight once, but for one that the embedding and the head share, which two have."""
    for cell in (STAGED[5], replace(STAGED[5], model="llama-tied")):
        resolved = resolved_from(cell.recipe())
        planner = Planner.of(resolved, cell.length)
        found = sum(part.elements() for part in planner.holdings_of(resolved))
        shared = planner.holdings.embed[0].numel if planner.holdings.tied else 0
        assert found == planner.holdings.elements() + shared
        assert sum(len(part.order) for part in planner.holdings_of(resolved)) == len(planner.holdings.order)


def test_micro_batches_in_flight_take_memory() -> None:
    """The first of four stages has at most four in flight, whatever the accumulation."""
    peaks = {count: predicted(replace(STAGED[5], accumulation=count)) for count in (1, 4, 6, 32)}
    assert peaks[1] < peaks[4] < peaks[6] == peaks[32]  # the fifth finds gradients of the first


def test_a_plan_shows_each_stage(tmp_path: Path) -> None:
    cell = replace(STAGED[9], checkpointing="full")
    file, target = tmp_path / "recipe.yaml", tmp_path / "plan.json"
    file.write_text(json.dumps(cell.recipe() | {"machine": {"device": "cuda", "processes": 4}}))
    printed = io.StringIO()
    page = tmp_path / "plan.html"
    with redirect_stdout(printed):
        assert plan_command(Request(str(file), gpu="h100", json_target=str(target), page=str(page))) == 0
    assert "pipeline bubble" in page.read_text()
    assert "GiB of each stage: " in page.read_text()
    assert "stages, by block: 0–1 " in printed.getvalue()
    assert "pipeline bubble" in printed.getvalue()
    asked = next(c for c in json.loads(target.read_text())["candidates"] if c["asked"])
    assert asked["mesh"] == {"replicate": 1, "shard": 2, "pipeline": 2}
    assert [(one["first_block"], one["last_block"]) for one in asked["stages"]] == [(0, 1), (2, 3)]
    assert asked["peak_bytes"] == max(one["peak_bytes"] for one in asked["stages"])
    assert asked["sent_bytes"]["pipeline"] == 4 * 2 * 256 * 128 * 2
    assert asked["seconds"]["bubble"] > 0


def test_copies_of_a_stage_average_in_buckets() -> None:
    """Of the largest: more than 25 MiB where one gradient is larger."""
    cell = replace(STAGED[0], length=16, micro=1)
    recipe = cell.recipe() | {"machine": {"device": "cpu", "processes": 4}}
    recipe["strategy"] = {"name": "ddp", "mesh": {"pipeline": 2, "replicate": 2}}
    found = {}
    for values in (cell.recipe(), recipe):
        resolved = resolve(Recipe.model_validate(values))
        held = [
            strategy_of(resolved).memory_model()(h, resolved) for h in Planner.of(resolved, 16).holdings_of(resolved)
        ]
        found[resolved.mesh.replicate] = [one.finish_backward() for one in held]
        gradients = [one.trains * one.trained for one in held]
    assert found == {1: [0, 0], 2: gradients}, "a tiny stage is one bucket"


def test_other_loops_have_no_stages() -> None:
    with pytest.raises(InputError, match=r"transformers' Trainer does not divide blocks; plan it without"):
        check_loop("trainer", resolved_from(STAGED[0].recipe()))


def test_a_variant_without_stages_is_among_the_candidates() -> None:
    values = STAGED[9].recipe() | {"machine": {"device": "cuda", "processes": 4}}
    asked = resolve(Recipe.model_validate(values))
    found = Search(asked, device_named("h100", None), 0.05, Rates.on(device_named("h100", None))).all()
    assert {c.resolved.mesh.pipeline for c in found} == {1, 2}
    assert all(bool(c.stages) == (c.resolved.mesh.pipeline > 1) for c in found)
