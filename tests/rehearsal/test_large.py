"""Shards, groups and padding at 64, 512 and 1,024 ranks, and what a rank's own work costs there."""

from __future__ import annotations

from typing import Any

import pytest

from rehearsal.allowed import unexpected
from rehearsal.cells import Call
from rehearsal.large import (
    LLAMA_8B,
    LLAMA_70B,
    MESHES,
    SPLIT,
    WORLDS,
    cell,
    mesh_cell,
    mesh_part,
    part_here,
    rows_here,
    shapes,
)

_LAYERS = 2
"""Of the quick ones; the other 30 are the same again."""

_VIEWS = {"zero2": 1, "zero3": 3}
"""Operators of two steps at most for each parameter and rank: DeepSpeed 0.19.8 cuts gradients into the ranks' parts in
Python, stage 2 where a bucket is sent, stage 3 for each parameter (measured: 0.8 and 2.6)."""


def _runs(outcome: Any) -> None:
    assert outcome.error is None, outcome.error
    assert unexpected(outcome.reports) == []
    assert all(ok for _, _, ok in outcome.claims), outcome.claims
    assert len(outcome.losses) == 2
    assert outcome.skipped == [False, False]


def _check(outcome: Any, strategy: str, rank: int, world: int, layers: int) -> None:
    _runs(outcome)
    expected = {"fsdp2": rows_here, "zero3": part_here}.get(strategy)
    if expected is None:
        return  # flat partitions, which the claims count
    found = {name.removeprefix("module."): shape for name, (shape, _, _) in outcome.local.items()}
    assert found == {name: expected(shape, rank, world) for name, shape in shapes(layers).items()}


def _brief(strategy: str, world: int, rank: int, layers: int) -> Call:
    return Call("rehearse.brief", (cell(strategy, world, rank, layers),))


_SIZES = [
    pytest.param(
        strategy,
        _brief(strategy, 8, 7, _LAYERS),
        _brief(strategy, 1024, 1023, _LAYERS),
        id=strategy,
        marks=pytest.mark.nightly,
    )
    for strategy in SPLIT
]


@pytest.mark.parametrize(("strategy", "few_ranks", "many_ranks"), _SIZES)
def test_work_of_a_rank_does_not_grow_with_their_number(
    stage: Any, strategy: str, few_ranks: Call, many_ranks: Call
) -> None:
    few, many = stage(few_ranks), stage(many_ranks)
    _check(few, strategy, 7, 8, _LAYERS)
    _check(many, strategy, 1023, 1024, _LAYERS)
    assert len(many.groups) <= len(few.groups) + 1  # the ranks of this host
    before, after = few.counts["step"], many.counts["step"]
    if strategy != "zero2":  # it sends a bucket's slices rank by rank
        assert after.collectives == before.collectives
    # Padding and chunks of other sizes may take another operator or two each.
    views = _VIEWS.get(strategy, 0) * len(shapes(_LAYERS)) * (1024 - 8)
    assert after.operators <= 1.2 * before.operators + views


def _whole() -> list[Any]:
    found = []
    for strategy in SPLIT:
        for world in WORLDS:
            for rank in (0, world // 2 + 3, world - 1):
                call = _brief(strategy, world, rank, 32)
                found.append(pytest.param(strategy, world, rank, call, id=f"{strategy}-{rank}of{world}"))
    return found


@pytest.mark.weekly
@pytest.mark.parametrize(("strategy", "world", "rank", "call"), _whole())
def test_8b(stage: Any, strategy: str, world: int, rank: int, call: Call) -> None:
    _check(stage(call), strategy, rank, world, 32)


def _meshes() -> list[Any]:
    found = []
    for name in MESHES:
        for size, config in (("8b", LLAMA_8B), ("70b", LLAMA_70B)):
            for rank in (0, 259, 511):
                quick = (name, size, rank) == ("layers-hybrid", "8b", 511)
                layers = _LAYERS if quick else config["num_hidden_layers"]
                call = Call("rehearse.brief", (mesh_cell(name, rank, config, layers),))
                marks = pytest.mark.nightly if quick else pytest.mark.weekly
                found.append(pytest.param(name, config, rank, layers, call, id=f"{name}-{size}-{rank}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "config", "rank", "layers", "call"), _meshes())
def test_meshes_of_512_ranks(stage: Any, name: str, config: dict[str, Any], rank: int, layers: int, call: Call) -> None:
    """Llama 3 8B and 70B, every layer of them; the quick one has two."""
    outcome = stage(call)
    _runs(outcome)
    whole = shapes(layers, config["hidden_size"], config["intermediate_size"])
    found = {name.removeprefix("module."): shape for name, (shape, _, _) in outcome.local.items()}
    assert found == {weight: mesh_part(name, weight, shape, rank) for weight, shape in whole.items()}
    sizes = {size for size, _ in outcome.groups}
    mesh = MESHES[name][1]
    # All, those of an axis, and those that have the same part of every layer. Rows' parts shard with the others.
    asked = {512, *mesh.values(), 512 // mesh.get("tensor", 1)}
    assert sizes == asked - ({256} if "context" in mesh else set())
