"""Ranks that hold parts and ranks that hold copies: the plain loop's numbers, and checkpoints that any mesh resumes.

Two axes need four processes, and are nightly. test_mesh_runs.py has the axes that divide the model or the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import Run, plain_run, resolved_from, train_job, worst
from tiny import LLAMA, recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.training import checkpoint
from toolkit.training.finding import newest
from toolkit.training.loop import sum_over_ranks
from toolkit.training.manifest import read_manifest
from toolkit.training.session import open_session
from toolkit.training.tensor_folder import read_index

HYBRIDS = ["fsdp1", "fsdp2", "zero3"]
SQUARE = {"replicate": 2, "shard": 2}
ODD = LLAMA | {"vocab_size": 301}
"""No group of ranks divides the embedding in equal rows."""
GRADIENT = 3e-6
"""See test_strategies.py."""


def recipe_for(strategy: str, root: Path, mesh: dict[str, int] | None, **sections: Any) -> dict[str, Any]:
    own = {"name": strategy} | ({"mesh": mesh} if mesh else {})
    processes = (mesh or {}).get("replicate", 1) * (mesh or {}).get("shard", 1) if mesh else 2
    sections = {"machine": {"processes": processes}, "model": {"config": ODD}} | sections
    return recipe_dict(root, strategy=own, **sections)


def check_against_the_plain_loop(group: WorkerGroup, recipe: dict[str, Any], steps: int) -> Run:
    resolved = resolved_from(recipe)
    expected = plain_run(resolved_from(recipe | {"activation_checkpointing": "none"}), steps)
    found: Run = group.run(train_job, resolved, steps, timeout=500)[0]
    assert dict(found.claims)["copies x parts of each weight"], found.claims
    assert all(ok for _, ok in found.claims), found.claims
    assert found.tokens == expected.tokens
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    gradients = {name: g for name, g in expected.first_gradient.items() if g is not None and g.norm() > 0}
    assert worst({name: found.first_gradient[name] for name in gradients}, gradients)[0] < GRADIENT
    assert worst(found.weights, expected.weights)[0] < 1e-5
    return found


@pytest.mark.parametrize("strategy", [pytest.param("fsdp1", marks=pytest.mark.nightly), "fsdp2"])
def test_one_axis_of_two_ranks_engages_and_equals_the_plain_loop(
    strategy: str, tiny_root: Path, group: WorkerGroup
) -> None:
    check_against_the_plain_loop(group, recipe_for(strategy, tiny_root, {"replicate": 1, "shard": 2}), 4)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, {"r": 4, "dropout": 0.2}], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_twenty_steps_of_two_by_two_equal_the_plain_loop(
    strategy: str, adapter: dict[str, Any] | None, tiny_root: Path, four: WorkerGroup
) -> None:
    """Ragged windows, clipping over the whole mesh, two micro-batches a step, recomputed blocks."""
    limit = 1.0 if adapter is None else 1e-3  # an adapter's gradients are small
    recipe = recipe_for(
        strategy,
        tiny_root,
        SQUARE,
        adapter=adapter,
        activation_checkpointing="full",
        optimizer={"max_grad_norm": limit},
        run={"max_steps": 20},
    )
    found = check_against_the_plain_loop(four, recipe, 20)
    assert len(set(found.tokens)) > 5
    assert any(norm > limit for norm in found.norms), "clipping is exercised"


@pytest.mark.nightly
def test_a_group_of_one_size_does_not_leave_its_groups_to_the_next_run(tiny_root: Path, four: WorkerGroup) -> None:
    """hpZ's groups are a global of DeepSpeed's."""
    meshes = [SQUARE, {"replicate": 1, "shard": 4}, SQUARE]
    for mesh in meshes:
        recipe = recipe_for("zero3", tiny_root, mesh)
        claims = dict(four.run(train_job, resolved_from(recipe), 1, timeout=300)[0].claims)
        assert all(claims.values())
        assert ("weights with a second copy" in claims) == (mesh is SQUARE)


def whole_job(resolved: Resolved, folder: str) -> dict[str, torch.Tensor]:
    """Every weight and moment of a session that took a checkpoint, before any step."""
    session = open_session(resolved)
    checkpoint.load(session, Path(folder))
    found = {name: session.engine.full_weight(name) for name in session.engine.shapes}
    for name in session.engine.shapes:
        state = session.engine.full_state(name)
        assert state is not None
        found |= {f"{name}.{key}": moment for key, moment in state.moments.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


OTHERS = ["fsdp2", "ddp", "zero3", "zero1"]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_a_checkpoint_resumes_under_other_meshes_and_comes_back(
    strategy: str, tiny_root: Path, four: WorkerGroup, group: WorkerGroup, tmp_path: Path
) -> None:
    """Bit-equal when loaded, by every rank of every copy; trained on, equal to the run that was not interrupted."""
    run = {"max_steps": 6}
    hybrid = recipe_for(strategy, tiny_root, SQUARE, run=run)
    whole: Run = four.run(train_job, resolved_from(hybrid), 6, None, None, 6, timeout=500)[0]
    saved: Run = four.run(train_job, resolved_from(hybrid), 3, str(tmp_path / "a"), None, 6, timeout=500)[0]
    right = saved.weights | saved.moments
    first = newest(tmp_path / "a")
    assert first is not None
    resumed: Run = four.run(train_job, resolved_from(hybrid), 3, None, str(first), 6, timeout=500)[0]
    assert resumed.losses == whole.losses[3:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    for other in OTHERS:
        recipe = recipe_for(other, tiny_root, None, run=run, batch={"accumulation": 4})
        for rank in group.run(whole_job, resolved_from(recipe), str(first), timeout=300):
            assert rank.keys() == right.keys()
            assert all(torch.equal(rank[name], tensor) for name, tensor in right.items()), other
    # On under another strategy for a step, and back.
    recipe = recipe_for("ddp", tiny_root, None, run=run, batch={"accumulation": 4})
    moved: Run = group.run(train_job, resolved_from(recipe), 1, str(tmp_path / "b"), str(first), 6, timeout=300)[0]
    second = newest(tmp_path / "b")
    assert second is not None
    for rank in four.run(whole_job, resolved_from(hybrid), str(second), timeout=300):
        assert all(torch.equal(rank[name], tensor) for name, tensor in (moved.weights | moved.moments).items())
    back: Run = four.run(train_job, resolved_from(hybrid), 2, None, str(second), 6, timeout=300)[0]
    assert [*moved.losses, *back.losses] == pytest.approx(whole.losses[3:], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_copies_take_turns_to_write(strategy: str, tiny_root: Path, four: WorkerGroup, tmp_path: Path) -> None:
    """Each element once, and each group of ranks about as much."""
    recipe = recipe_for(strategy, tiny_root, SQUARE)
    four.run(train_job, resolved_from(recipe), 1, str(tmp_path), timeout=300)
    folder = newest(tmp_path)
    assert folder is not None
    weights, _ = read_index(folder, read_manifest(folder))
    total = sum(entry.numel for entry in weights.values())
    written = [0] * 4
    for entry in weights.values():
        for file, piece in entry.pieces:
            written[int(file.split("-")[1])] += piece.numel
    assert sum(written) == total
    assert all(written), "no rank leaves writing to the others"
    assert 0.4 * total < sum(written[:2]) < 0.6 * total, written


def owned_job(resolved: Resolved) -> dict[str, tuple[float, float]]:
    """By weight: the squares of what all ranks own, added up, and those of the whole weight."""
    engine = open_session(resolved).engine
    found = {}
    for name in engine.shapes:
        own = sum((values.double().square().sum() for _, values in engine.own_weight(name)), torch.zeros(()).double())
        found[name] = (float(sum_over_ranks(own)), float(engine.full_weight(name).double().square().sum()))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", HYBRIDS)
def test_what_ranks_own_is_counted_once(strategy: str, tiny_root: Path, four: WorkerGroup) -> None:
    """Norms of groups (run.group_norms) are sums over what each rank owns."""
    for seen, right in four.run(owned_job, resolved_from(recipe_for(strategy, tiny_root, SQUARE)))[0].values():
        assert seen == pytest.approx(right, rel=1e-9)
