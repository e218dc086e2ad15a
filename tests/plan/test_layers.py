"""`plan` of layers that ranks divide: bytes on the wire; memory is in the matrix (plan/cells.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plan.cells import LAYERED, Cell
from plan.truth import predicted, resolved_from
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.hardware import device_named
from toolkit.planning.predict import Planner
from toolkit.planning.search import Search
from toolkit.planning.time import Rates, exchanged
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of

ALONE = LAYERED[3:7]
"""On two processes, of which none shards."""
CASES = [*ALONE[:3], replace(ALONE[0], model="qwen3", micro=1)]


def added_job(recipe: dict[str, Any], length: int) -> float:
    """What a rank sends around the ring of those that divide its layers, in one micro-batch of a real step, in bytes.
    Its last sums, of the norm, are the optimizer's."""
    import torch.distributed as dist

    from toolkit.planning.measure import measure

    right, sizes = dist.all_reduce, []

    def counted(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is not None and group.size() == 2 and tensor.dim() > 0:
            sizes.append(tensor.numel() * tensor.element_size())
        return right(tensor, *args, group=group, **kwargs)

    dist.all_reduce = counted
    try:
        measure(resolved_from(recipe), length, steps=1, track=False)
    finally:
        dist.all_reduce = right
    return sum(sizes) / recipe["batch"]["accumulation"]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("cell", CASES, ids=lambda cell: cell.name)
def test_bytes_on_the_wire_are_those_of_a_real_step(cell: Cell, group: WorkerGroup) -> None:
    """Hidden states where they leave a half of a block, and their gradients where they enter each matrix of one."""
    resolved = resolved_from(cell.recipe())
    planner = Planner.of(resolved, cell.length)
    [sent] = exchanged(planner.segments_of(resolved), list(planner.skeleton.holdings.order), resolved.mesh)
    assert sent.axis == "tensor"
    assert sent.size == group.run(added_job, cell.recipe(), cell.length)[0] > 0


def test_half_of_every_layer_takes_less_memory_than_all_of_it() -> None:
    """Weights of layers, their gradients and moments are halved; embeddings, head and hidden states are not."""
    half = LAYERED[4]
    whole = replace(half, mesh=None, strategy="ddp", tensor=False)
    assert 0.5 < predicted(half) / predicted(whole) < 0.85


def test_weights_are_counted_whole_where_they_are_reported() -> None:
    half = LAYERED[4]
    divided, whole = (Planner.of(resolved_from(one.recipe()), one.length).skeleton.holdings
                      for one in (half, replace(half, mesh=None, tensor=False)))  # fmt: skip
    assert divided.elements() < whole.elements()
    assert divided.elements(whole=True) == whole.elements(whole=True) == whole.elements()


def test_every_process_reads_its_own_part_of_a_layer() -> None:
    found = {}
    for one in (LAYERED[0], replace(LAYERED[0], tensor=False)):
        resolved = resolved_from(one.recipe())
        model = strategy_of(resolved).memory_model()(Planner.of(resolved, one.length).skeleton.holdings, resolved)
        found[one.tensor] = sum(model.host_loading())
    assert found[True] < found[False]


def test_other_strategies_are_planned_with_whole_layers() -> None:
    recipe = LAYERED[0].recipe() | {"machine": {"device": "cuda", "processes": 4}}
    asked = resolve(Recipe.model_validate(recipe), "recipe", device="cuda")
    found = Search(asked, device_named("h100", None), 0.1, Rates()).all(every=True)
    kinds = {(one.resolved.recipe.strategy.name, one.resolved.mesh.tensor) for one in found}
    assert kinds == {("fsdp2", 2), *((name, 1) for name in ("ddp", "zero1", "zero2", "zero3", "fsdp1"))}
    own = next(one for one in found if one.asked)
    assert "tensor 2" in own.label
    assert own.as_json()["mesh"] == {"replicate": 1, "shard": 2, "tensor": 2}
    assert own.sent["tensor"] > 0
    assert own.seconds is not None
    assert own.seconds.exposed > 0


def test_only_the_toolkits_loop_divides_layers() -> None:
    from toolkit.planning.loops import check_loop

    with pytest.raises(InputError, match=r"does not divide layers; plan it without strategy\.mesh\.tensor"):
        check_loop("trainer", resolved_from(LAYERED[0].recipe()))
