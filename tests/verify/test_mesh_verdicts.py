"""`verify` proves hybrids on four processes, and finds what is wrong with them. Slow: two axes need four processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.verification.diagnose.attribution import Attribution
from toolkit.verification.diagnose.gradient import by_weights
from toolkit.verification.faults import fault_class
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify

SQUARE = {"replicate": 2, "shard": 2}
LORA = {"r": 4, "dropout": 0.1}
AXES = {
    "fsdp1": {"all-gather shard", "reduce-scatter shard", "all-reduce replicate"},
    "fsdp2": {"all-gather shard", "reduce-scatter shard", "all-reduce replicate"},
    "zero3": {"all-gather shard", "reduce-scatter all"},
}


def square(recipe: Callable[..., Resolved], strategy: str, **sections: Any) -> Resolved:
    return recipe(strategy, strategy={"mesh": SQUARE}, machine={"processes": 4}, **sections)


@pytest.mark.nightly
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", AXES)
def test_two_by_two_is_equivalent(
    strategy: str, adapter: dict[str, Any] | None, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    """The logic pass is in float32, the precision pass in bf16; a checkpoint goes there and back in both."""
    resolved = square(
        recipe, strategy, precision="bf16", adapter=adapter, activation_checkpointing="full" if adapter else "none"
    )
    outcome = verify(resolved, group=four, time_limit=300)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    for one in outcome.passes:
        claims: list[Claim] = one.claims
        assert {c.expected for c in claims if c.id == "mesh-collectives"} == AXES[strategy]
        assert {c.seen for c in claims if c.claim == "copies x parts of each weight"} == {"2 x 2"}
        assert {c.seen for c in claims if c.id == "mesh-copies"} == {"2"}
        held = next(c for c in claims if c.id in ("share-of-weights", "share-of-state"))
        assert held.expected == ("25.0 %" if strategy == "zero3" else "50.0 %")


OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16-pure": {"precision": "bf16-pure"},
    "ema": {"run": {"ema": {"decay": 0.9}}},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-4}},
    "muon": {"optimizer": {"name": "muon"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "fused-loss": {"loss": "fused", "precision": "bf16"},
    "packing": {"data": {"packing": True}},
    "gathered-once": {"strategy": {"reshard_after_forward": False, "sync": "last"}},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        *(("fsdp2", option) for option in OPTIONS),
        *(("fsdp1", option) for option in ("fp16", "bf16-pure", "ema", "fused-loss")),
        *(("zero3", option) for option in ("bf16-pure", "ema", "fused-loss")),  # DeepSpeed has fp16 on GPUs alone
    ],
)
def test_two_by_two_with_an_option_is_equivalent(
    strategy: str, option: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    sections = {key: dict(value) if isinstance(value, dict) else value for key, value in OPTIONS[option].items()}
    sections["strategy"] = {"mesh": SQUARE} | sections.get("strategy", {})
    outcome = verify(recipe(strategy, machine={"processes": 4}, **sections), group=four, time_limit=300)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


FAULTS = [
    ("replicas-not-reduced", "fsdp1", "gradient", "gradient-of-one-copy"),
    ("replicas-not-reduced", "fsdp2", "gradient", "gradient-of-one-copy"),
    ("replicas-counted-twice", "fsdp1", "gradient", "gradients-of-copies-added"),
    ("replicas-counted-twice", "fsdp2", "gradient", "gradients-of-copies-added"),
    ("replicas-counted-twice", "zero3", "gradient", "gradients-of-copies-added"),
    ("second-copy-stale", "zero3", "forward", "weights-of-an-earlier-step"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "strategy", "stage", "diagnosis"), FAULTS)
def test_a_fault_of_the_mesh_is_found_and_named(
    fault: str, strategy: str, stage: str, diagnosis: str, recipe: Callable[..., Resolved], four: WorkerGroup
) -> None:
    """The recipe has no mesh and two processes: the fault brings its own."""
    outcome = verify(recipe(strategy), group=four, fault=fault, time_limit=300, stop_early=True)
    assert outcome.resolved.mesh == Mesh(2, 2)
    assert outcome.exit_code == 1
    assert what_caught(outcome)[0] == stage
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == diagnosis


def test_every_hybrid_has_its_faults() -> None:
    expected = {(fault, strategy) for fault, strategy, _, _ in FAULTS}
    assert expected == {(f, s) for f in {f for f, _ in expected} for s in fault_class(f).strategies.names()}


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ([1, 1, 0, 0], "gradient-of-one-copy"),  # divided by all ranks
        ([2, 2, 0, 0], "gradient-of-one-copy"),  # averaged over the copy's own
        ([2, 2, 2, 2], "gradients-of-copies-added"),
        ([0.5, 0.5, 0.5, 0.5], "gradients-of-copies-added"),
        ([4, 4, 4, 4], "ranks-summed"),
        ([4, 0, 0, 0], "ranks-not-reduced"),
        ([0, 0, 2, 2], "micro-batch-weights"),  # rank 0 is in the first copy
    ],
)
def test_weights_by_copy_are_named(weights: list[float], cause: str) -> None:
    places = [(rank, 0) for rank in range(4)]
    found = Attribution([float(w) for w in weights], places, [5, 7, 4, 9], 0.0)
    diagnosis = by_weights(found, 1, 4, Mesh(2, 2))
    assert diagnosis is not None
    assert diagnosis.id == cause
    without = by_weights(found, 1, 4, Mesh(1, 4))
    assert without is None or "cop" not in without.id
