"""`plan` of experts that ranks divide: bytes on the wire; memory is in the matrix (plan/cells.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from plan.cells import EXPERTS, MODELS, Cell
from plan.truth import balanced, predicted, resolved_from
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.planning.hardware import device_named
from toolkit.planning.predict import Planner
from toolkit.planning.scale import meshes
from toolkit.planning.search import Search
from toolkit.planning.time import Rates, exchanged
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of

CASES = [EXPERTS[0], replace(EXPERTS[0], checkpointing="full"), EXPERTS[3], EXPERTS[6]]
SHARDED = [EXPERTS[1], EXPERTS[2]]


def given_job(recipe: dict[str, Any], length: int) -> float:
    """What a rank gives to the others that divide its experts, in one micro-batch of a real step, in bytes."""
    import torch.distributed as dist

    from toolkit.planning.measure import measure

    right, sizes = dist.all_to_all_single, []

    def counted(into: torch.Tensor, rows: torch.Tensor, taken: Any = None, given: Any = None, **rest: Any) -> Any:
        if given is not None:  # not the exchange of how many rows there are
            sizes.append((sum(given) - given[dist.get_rank(rest["group"])]) * rows[:1].numel() * rows.element_size())
        return right(into, rows, taken, given, **rest)

    dist.all_to_all_single = counted
    try:
        with balanced():
            measure(resolved_from(recipe), length, steps=1, track=False)
    finally:
        dist.all_to_all_single = right
    return sum(sizes) / recipe["batch"]["accumulation"]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("cell", CASES, ids=lambda cell: cell.name)
def test_bytes_on_the_wire_are_those_of_a_real_step(cell: Cell, group: WorkerGroup) -> None:
    """A row for each expert of a token and its number, the result, and both gradients; recomputed blocks twice."""
    resolved = resolved_from(cell.recipe())
    planner = Planner.of(resolved, cell.length)
    [sent] = exchanged(planner.segments_of(resolved), list(planner.skeleton.holdings.order), resolved.mesh)
    assert sent.axis == "expert"
    assert sent.size == group.run(given_job, cell.recipe(), cell.length)[0] > 0


def gathered_job(recipe: dict[str, Any], length: int) -> float:
    """What a rank sends in one step to those that shard the same experts, in bytes: a part of a ring of two."""
    import torch.distributed as dist

    from toolkit.planning.measure import measure

    resolved = resolved_from(recipe)
    sizes: list[float] = []

    def counting(right: Any) -> Any:
        """Of torch's gather and reduction, which have the larger tensor and the smaller, and the group."""

        def counted(*tensors: torch.Tensor, group: Any = None, **keys: Any) -> Any:
            copies = resolved.mesh.expert_copies(dist.get_rank())
            if dist.get_process_group_ranks(group) == copies:
                both = [one for one in (*tensors, *keys.values()) if isinstance(one, torch.Tensor)]
                sizes.append(max(one.nbytes for one in both) * (len(copies) - 1) / len(copies))
            return right(*tensors, group=group, **keys)

        return counted

    with (
        mock.patch.object(dist, "all_gather_single", counting(dist.all_gather_single)),
        mock.patch.object(dist, "reduce_scatter_single", counting(dist.reduce_scatter_single)),
        balanced(),
    ):
        measure(resolved, length, steps=1, track=False)
    return sum(sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", SHARDED, ids=lambda cell: cell.name)
def test_bytes_of_sharded_experts_are_those_of_a_real_step(cell: Cell, four: WorkerGroup) -> None:
    resolved = resolved_from(cell.recipe())
    planner = Planner.of(resolved, cell.length)
    sent = strategy_of(resolved).traffic(resolved, planner.skeleton.holdings).by_axis(resolved.accumulation)
    assert sent["copies"] == four.run(gathered_job, cell.recipe(), cell.length)[0] > 0


def test_half_of_the_experts_takes_less_memory_than_all_of_them() -> None:
    half = EXPERTS[0]
    whole = replace(half, strategy="ddp", experts=False)
    assert 0.5 < predicted(half) / predicted(whole) < 0.85
    divided, all_of_them = (Planner.of(resolved_from(one.recipe()), one.length).skeleton.holdings
                            for one in (half, whole))  # fmt: skip
    assert divided.elements() < all_of_them.elements()
    assert divided.elements(whole=True) == all_of_them.elements()


def test_sharded_experts_are_gathered_by_the_ranks_that_have_the_same_ones() -> None:
    """Everything else by all ranks; gradients likewise, and copies add up what they have."""

    def sent(**mesh: int) -> dict[str, float]:
        recipe = EXPERTS[0].recipe() | {"machine": {"device": "cuda", "processes": math.prod(mesh.values())}}
        recipe |= {"strategy": {"name": "fsdp2", "mesh": mesh}, "precision": "fp32"}
        resolved = resolve(Recipe.model_validate(recipe), "recipe", device="cuda")
        holdings = Planner.of(resolved, 64).skeleton.holdings
        return strategy_of(resolved).traffic(resolved, holdings).by_axis(1)

    config = EXPERTS[0].recipe()["model"]["config"]
    experts = config["num_hidden_layers"] * 4 * 3 * config["hidden_size"] * config["intermediate_size"]
    assert set(sent(expert=4, shard=1)) == {"all"}
    sharded = sent(expert=2, shard=2)
    assert sharded["copies"] == 3 * (1 / 2) * experts / 2 * 4  # two gathers and a reduction of half of the experts
    assert sharded["all"] == sent(expert=4, shard=1)["all"]
    copied = sent(expert=2, shard=1, replicate=2)
    assert copied["replicate"] > experts / 2 * 4, "experts are whole on each of the copies"
    assert "copies" not in copied


@pytest.mark.nightly
def test_other_strategies_are_planned_with_all_experts() -> None:
    recipe = EXPERTS[0].recipe() | {"machine": {"device": "cuda", "processes": 2}}
    asked = resolve(Recipe.model_validate(recipe), "recipe", device="cuda")
    found = Search(asked, device_named("h100", None), 0.1, Rates()).all(every=True)
    kinds = {(one.resolved.recipe.strategy.name, one.resolved.mesh.expert) for one in found}
    assert kinds >= {("ddp", 1), ("fsdp2", 2), ("zero3", 1)}
    assert {parts for name, parts in kinds if name != "fsdp2"} == {1}
    own = next(one for one in found if one.asked)
    assert "expert 2" in own.label
    assert own.as_json()["mesh"] == {"replicate": 1, "shard": 2, "expert": 2}
    assert own.sent["expert"] > 0
    assert own.seconds is not None
    assert own.seconds.exposed > 0


def test_a_mixture_is_planned_with_its_experts_divided_unasked() -> None:
    """Into as many parts as a node has processes, and the experts allow; nothing but a mixture is."""

    def tried(config: dict[str, Any], adapter: Any = None, **strategy: Any) -> set[tuple[str, int]]:
        recipe = EXPERTS[0].recipe() | {"machine": {"device": "cuda", "processes": 8}, "adapter": adapter}
        recipe |= {"strategy": {"name": "fsdp2"} | strategy, "model": {"config": config}}
        asked = resolve(Recipe.model_validate(recipe), "recipe", device="cuda")
        variants = Search(asked, device_named("h100", None), 0.1, Rates())._variants()
        return {(one.recipe.strategy.name, one.mesh.expert) for one in variants}

    mixture = EXPERTS[0].recipe()["model"]["config"]
    assert {("fsdp2", 1), ("fsdp2", 4), ("ddp", 1)} <= tried(mixture)
    assert {size for name, size in tried(mixture) if name != "fsdp2"} == {1}
    assert {size for _, size in tried(mixture, mesh={"shard": 4, "context": 2})} == {1}
    assert {size for _, size in tried(MODELS["llama"])} == {1}
    assert ("fsdp2", 4) in tried(mixture, {"r": 4, "target_modules": ["q_proj"]})
    assert ("fsdp2", 4) in tried(mixture, {"r": 4}), "PEFT puts adapters on experts by default"


@pytest.mark.nightly
def test_adapters_on_experts_are_not_planned_under_fsdp1() -> None:
    """A run under it is refused (tests/strategies/test_expert_adapters.py): a plan of it would be of nothing."""

    def search(name: str, adapter: Any) -> Search:
        recipe = EXPERTS[0].recipe() | {"machine": {"device": "cuda", "processes": 2}, "adapter": adapter}
        asked = resolve(Recipe.model_validate(recipe | {"strategy": {"name": name}}), "recipe", device="cuda")
        return Search(asked, device_named("h100", None), 0.1, Rates())

    on_experts, on_attention = {"r": 4}, {"r": 4, "target_modules": ["q_proj"]}
    with pytest.raises(InputError, match=r"strategy\.name: fsdp1 .* use fsdp2"):
        search("fsdp1", on_experts).all()
    for adapter, there in ((on_experts, False), (on_attention, True)):
        names = {one.resolved.recipe.strategy.name for one in search("ddp", adapter).all()}
        assert ("fsdp1" in names) == there


def test_meshes_of_experts_are_tried_on_paper() -> None:
    from toolkit.strategies import strategies

    kinds = list(meshes(strategies()["fsdp2"].traits, 8, 2))
    assert {"expert": 2, "replicate": 8} in kinds
    assert {"expert": 8, "replicate": 2} in kinds
    assert {"expert": 2, "shard": 8} in kinds
    for name in ("ddp", "zero3"):
        assert not any(mesh and "expert" in mesh for mesh in meshes(strategies()[name].traits, 8, 2))
