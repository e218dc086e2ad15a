"""Rows whose tokens are divided over ranks (`strategy.mesh.context`): proven equal, and found where they are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from families import EVERY_FAMILY
from jobs import assert_goes_on, assert_weights, plain_run, resolved_from, train_job
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.model.context import attention, part_of_rows
from toolkit.recipe.mesh import Mesh, RowPart
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.reference.loop import PlainLoop
from toolkit.strategies import resolve, strategies
from toolkit.verification.faults import fault_class, faults
from toolkit.verification.faults.context import __name__ as FAULTS
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify
from verdicts import assert_equivalent

LORA = {"r": 4, "dropout": 0.1}
DISTRIBUTED = [name for name, strategy in strategies().items() if strategy.traits.distributed]
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 8}


def in_two(recipe: Callable[..., Resolved], strategy: str, **sections: Any) -> Resolved:
    mesh = {"mesh": {"context": 2}} | sections.pop("strategy", {})
    return recipe(strategy, strategy=mesh, **sections)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("ddp", {"precision": "bf16", "adapter": LORA, "activation_checkpointing": "full"}),
        ("zero2", {"data": {"packing": True}}),
        ("fsdp2", {"precision": "bf16", "loss": "fused"}),
    ],
)
def test_two_parts_are_equivalent(
    strategy: str, sections: dict[str, Any], recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """With dropout in attention, and half as many key heads as query heads."""
    outcome = verify(in_two(recipe, strategy, **sections), group=group, time_limit=200)
    assert_equivalent(outcome)
    logic = outcome.passes[0]
    assert logic.replayed is not None
    assert logic.replayed.from_natural, "the plain loop's parts were held against its whole rows"
    assert max(one.gradient for one in logic.replayed.from_natural) < 1e-5
    assert any(m.kind == "gradient-reordered" for stage in logic.stages for m in stage.measures)
    for one in outcome.passes:
        [claim] = [c for c in one.claims if c.id == "mesh-collectives" and c.expected == "all-to-all context"]
        assert claim.ok
        assert next(s for s in one.stages if s.name == "gradient").detection_limit == pytest.approx(4.8e-7, rel=0.01)


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("model", [LLAMA, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_every_strategy_in_two_parts(
    strategy: str, model: dict[str, Any], adapter: Any, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    resolved = in_two(recipe, strategy, model={"config": model}, adapter=adapter, precision="bf16")
    assert_equivalent(verify(resolved, group=group, time_limit=200))


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16-pure": {"precision": "bf16-pure"},
    "terms": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "packed-checkpointed": {"data": {"packing": True}, "activation_checkpointing": "full", "precision": "bf16"},
    "selective": {"activation_checkpointing": "selective"},
    "ema": {"run": {"ema": {"decay": 0.9}}},
    "muon": {"optimizer": {"name": "muon"}},
    "one-key-head": {"model": {"config": LLAMA | {"num_key_value_heads": 1}}, "precision": "bf16"},
    "tied": {"model": {"config": LLAMA | {"tie_word_embeddings": True}}, "precision": "bf16"},
    "sliding": {"model": {"config": LLAMA | {"model_type": "mistral", "sliding_window": 5}}, "precision": "bf16"},
    "experts": {
        "model": {"config": QWEN | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 32}}
    },
    "positions-learned": {
        "model": {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300,
                             "n_positions": 64}}
    },
}  # fmt: skip


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.parametrize("option", OPTIONS)
def test_two_parts_with_an_option(option: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    assert_equivalent(verify(in_two(recipe, "fsdp2", **OPTIONS[option]), group=group, time_limit=200))


def _families() -> list[str]:
    """Those whose rows can be divided."""
    found = []
    for name, model in EVERY_FAMILY.items():
        values = recipe_dict(Path("nowhere"), strategy={"name": "fsdp2", "mesh": {"context": 2}}, model=dict(model))
        with contextlib.suppress(InputError):
            resolve(Recipe.model_validate(values | {"machine": {"processes": 2}}), "recipe", device="cpu")
            found.append(name)
    return found


def test_most_families_can_be_divided() -> None:
    assert len(_families()) >= 33


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
@pytest.mark.parametrize("family", _families())
def test_every_family_in_two_parts(family: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    resolved = in_two(recipe, "fsdp2", model=dict(EVERY_FAMILY[family]), precision="bf16", batch={"accumulation": 2})
    assert_equivalent(verify(resolved, group=group, time_limit=200))


SQUARES = {
    "fsdp2-shard": ("fsdp2", {"shard": 2, "context": 2}),
    "fsdp2-replicate": ("fsdp2", {"replicate": 2, "context": 2}),
    "fsdp2-four": ("fsdp2", {"context": 4}),
    "fsdp1-shard": ("fsdp1", {"shard": 2, "context": 2}),
    "zero3-shard": ("zero3", {"shard": 2, "context": 2}),
    "zero2-four": ("zero2", {"context": 4}),
    "ddp-replicate": ("ddp", {"replicate": 2, "context": 2}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("square", SQUARES)
def test_four_processes(square: str, adapter: Any, recipe: Callable[..., Resolved], four: WorkerGroup) -> None:
    strategy, mesh = SQUARES[square]
    resolved = recipe(
        strategy, strategy={"mesh": mesh}, machine={"processes": 4}, adapter=adapter, precision="bf16"
    )  # fmt: skip
    assert_equivalent(verify(resolved, group=four, time_limit=300))


KINDS = [one for one in faults().values() if one.__module__ == FAULTS]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        (one.id, name) if name == ("ddp", "fsdp2")[at % 2] else pytest.param(one.id, name, marks=pytest.mark.nightly)
        for at, one in enumerate(KINDS)
        for name in one.strategies.names()
    ],
)
def test_a_fault_with_parts_is_found_and_named(
    fault: str, strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """The recipe has no mesh: the fault brings its own."""
    outcome = verify(recipe(strategy), group=group, fault=fault, time_limit=200, stop_early=True)
    assert outcome.resolved.mesh.context == 2
    assert outcome.exit_code == 1
    kind = fault_class(fault)
    assert what_caught(outcome)[0] in kind.stages
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in kind.diagnoses


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("fault", ["parts-key-heads-mixed", "parts-same-masks"])
def test_a_fault_is_named_where_losses_hardly_differ(
    fault: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """With weights so small, every mistake with parts changes a loss by less than 1e-4: the nearest is the cause."""
    config = LLAMA | {"initializer_range": 0.002, "num_key_value_heads": 2}
    resolved = recipe("ddp", model={"config": config})
    outcome = verify(resolved, group=group, fault=fault, time_limit=200, stop_early=True, round_trip=False)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in fault_class(fault).diagnoses


@pytest.mark.usefixtures("launches")
def test_a_mistake_of_both_sides_is_found_by_the_whole_rows(
    recipe: Callable[..., Resolved], group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step: parts that agree with the plain loop's parts may both be wrong."""
    monkeypatch.setattr(
        PlainLoop, "mistake", property(lambda loop: "positions", lambda loop, value: None), raising=False
    )
    outcome = verify(recipe("ddp"), group=group, fault="parts-positions-restart", time_limit=200, stop_early=True)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    stage, measure = outcome.difference[1:]
    assert (stage.name, measure.kind) == ("gradient", "gradient-reordered")
    assert {m.step for m in stage.wrong if m.kind == "gradient-reordered"} == set(range(5))


def test_a_layer_without_the_mask_of_whole_rows_ends_the_run() -> None:
    """It would attend to its own part alone, whatever the other layers do."""
    q, labels = torch.randn(1, 4, 3, 8), torch.zeros(1, 6, dtype=torch.int64)
    inputs, part = {"input_ids": labels}, RowPart(0, 2)
    seen = []
    with (
        pytest.raises(RunFailed, match="Linear attends without the mask of whole rows"),
        part_of_rows(inputs, labels, part),
    ):
        attention(torch.nn.Linear(1, 1), q, q, q, None)
    with pytest.raises(RunFailed, match="no attention layer exchanged"), part_of_rows(inputs, labels, part) as own:
        seen.append([tuple(own[0]["input_ids"].shape), tuple(own[1].shape)])
    assert seen == [[(1, 3), (1, 4)]]


def divided(root: Path, name: str, **sections: Any) -> dict[str, Any]:
    values = recipe_dict(
        root,
        strategy={"name": name, "mesh": {"context": 2}},
        machine={"processes": 2},
        batch={"micro_size": 4, "accumulation": 2},
        data={"packing": True, "max_length": 48},
        run={"max_steps": 20},
    )
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return values


@pytest.mark.usefixtures("launches")
def test_twenty_steps_are_the_plain_loops(tiny_root: Path, group: WorkerGroup) -> None:
    """Weights within 1e-5 of one process that computes whole rows, with the same samples in the same steps."""
    run = group.run(train_job, resolved_from(divided(tiny_root, "fsdp2")), 20)[0]
    alone = divided(tiny_root, "single", machine={"processes": 1}, strategy={"mesh": None})
    plain = plain_run(resolved_from(alone), 20)
    assert run.tokens == plain.tokens
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert_weights(run, plain)


@pytest.mark.usefixtures("launches")
def test_a_run_goes_on_without_parts_and_with_them(tiny_root: Path, tmp_path: Path, group: WorkerGroup) -> None:
    """A checkpoint does not know that rows were divided."""
    parts = divided(tiny_root, "zero3")
    whole = divided(tiny_root, "ddp", strategy={"mesh": None}, batch={"micro_size": 2})
    for first, then in ((parts, whole), (whole, parts)):
        folder = tmp_path / first["strategy"]["name"]
        assert_goes_on(group, first, then, folder)


def test_the_parts_of_the_state() -> None:
    """Ranks that divide rows divide the state too, where the strategy shards it."""
    from toolkit.recipe.schema import MeshAxes

    assert Mesh.of(MeshAxes(shard=2, context=2), shards=True) == Mesh(1, 4, 2)
    assert Mesh.of(MeshAxes(replicate=2, context=4), shards=True) == Mesh(2, 4, 4)
    assert Mesh.of(MeshAxes(replicate=2, context=2), shards=False) == Mesh(4, 1, 2)
