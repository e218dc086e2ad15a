"""`strategy.mesh`: each axis is proven equal, and what is wrong with it is found and named.

The rows are in mesh_cases.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from mesh_cases import (
    DEFAULT,
    FAULTS,
    KILLED,
    MIXTRAL,
    NIGHTLY,
    OF_TWO,
    Killed,
    Row,
    collectives,
    evidence,
    faults_of,
    params,
    with_divisible_rows,
)

from tiny import LLAMA
from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.model.context import attention, part_of_rows
from toolkit.model.tensor import Ranks, split_layers
from toolkit.recipe.mesh import Mesh, RowPart
from toolkit.recipe.resolve import Resolved
from toolkit.reference.loop import PlainLoop
from toolkit.training.preparation import prepare_model
from toolkit.verification.cases.twin import twin_config
from toolkit.verification.diagnose.attribution import Attribution
from toolkit.verification.diagnose.gradient import by_weights
from toolkit.verification.faults import fault_class
from toolkit.verification.run import verify
from verdicts import assert_equivalent, assert_found

Make = Callable[..., Resolved]


@pytest.fixture
def more(four: WorkerGroup) -> Iterator[Callable[[int], WorkerGroup]]:
    """A group of as many processes as asked. With ``four``: in the same set."""
    groups: list[WorkerGroup] = []

    def start(ranks: int) -> WorkerGroup:
        groups.append(WorkerGroup(ranks))
        return groups[-1]

    yield start
    for one in groups:
        one.close()


# ------------------------------------------------------------------ verdicts


def check(row: Row, recipe: Make, group: WorkerGroup) -> None:
    outcome = verify(row.resolved(recipe), group=group, time_limit=300, round_trip=row.round_trip)
    assert_equivalent(outcome)
    logic = outcome.passes[0]
    for one in outcome.passes:
        assert {c.expected for c in one.claims if c.id == "mesh-collectives"} == collectives(row)
        assert {c.id for c in one.claims if c.ok} >= evidence(row)
        for claim, seen in row.seen.items():
            assert seen in {c.seen for c in one.claims if c.id == claim}
        if row.exact:
            gradient = next(stage for stage in one.stages if stage.name == "gradient")
            assert gradient.detection_limit == pytest.approx(4.8e-7, rel=0.01), "4 roundings of factors, nothing else"
    if row.exact and "pipeline" not in row.mesh:
        assert logic.replayed is not None
        assert logic.replayed.from_natural, "held against whole rows, layers and experts"
        assert max(step.gradient for step in logic.replayed.from_natural) < 1e-5
    if row.exact and "context" in row.mesh:
        assert any(measure.kind == "gradient-reordered" for stage in logic.stages for measure in stage.measures)
    if row.compared:
        assert any(row.compared in measure.name for stage in logic.stages for measure in stage.measures)


@pytest.mark.parametrize("row", params(NIGHTLY, lambda ranks: ranks == 2, DEFAULT))
def test_two_ranks_are_equivalent(row: Row, recipe: Make, group: WorkerGroup) -> None:
    check(row, recipe, group)


@pytest.mark.parametrize("row", params([*DEFAULT, *NIGHTLY], lambda ranks: ranks == 4))
def test_four_ranks_are_equivalent(row: Row, recipe: Make, four: WorkerGroup) -> None:
    check(row, recipe, four)


@pytest.mark.parametrize("row", params(NIGHTLY, lambda ranks: ranks > 4))
def test_more_ranks_are_equivalent(row: Row, recipe: Make, more: Callable[[int], WorkerGroup]) -> None:
    """With three copies a collective adds up gradients in an order of its own: the bound has its rounding."""
    check(row, recipe, more(row.ranks))


def test_ids_of_rows_are_their_own() -> None:
    """And most families can have their rows divided."""
    assert {name: n for name, n in Counter(row.id for row in [*DEFAULT, *NIGHTLY]).items() if n > 1} == {}
    assert len(with_divisible_rows()) >= 33


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize("killed", OF_TWO, ids=lambda killed: killed.id)
def test_what_is_wrong_with_an_axis_is_found(
    killed: Killed, recipe: Make, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe has what the fault needs already, on two ranks instead of four."""
    monkeypatch.setattr(fault_class(killed.fault), "needs_of", classmethod(lambda cls, resolved: {}))
    assert_found(killed.row.resolved(recipe), killed.fault, group)


def kill(killed: Killed, recipe: Make, group: WorkerGroup) -> None:
    row = killed.row
    resolved = row.resolved(recipe) if row.mesh else recipe(row.name, **row.sections)
    assert_found(resolved, killed.fault, group, killed.also)


@pytest.mark.parametrize("killed", params(KILLED, lambda ranks: ranks == 2))
def test_a_fault_of_rows_and_layers_is_found(killed: Killed, recipe: Make, group: WorkerGroup) -> None:
    kill(killed, recipe, group)


@pytest.mark.parametrize("killed", params(KILLED, lambda ranks: ranks == 4))
def test_a_fault_of_copies_stages_experts_and_pairs_is_found(killed: Killed, recipe: Make, four: WorkerGroup) -> None:
    kill(killed, recipe, four)


def test_every_axis_has_its_faults() -> None:
    assert {axis: len(faults_of(axis)) for axis in FAULTS} == {
        "context": 7, "tensor": 8, "pipeline": 7, "expert": 6, "hybrid": 3
    }  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["parts-key-heads-mixed", "parts-same-masks"])
def test_a_fault_is_named_where_losses_hardly_differ(fault: str, recipe: Make, group: WorkerGroup) -> None:
    """With weights so small, every mistake with parts changes a loss by less than 1e-4: the nearest is the cause."""
    resolved = recipe("ddp", model={"config": LLAMA | {"initializer_range": 0.002}})
    outcome = verify(resolved, group=group, fault=fault, time_limit=200, stop_early=True, round_trip=False)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id in fault_class(fault).diagnoses


def test_a_mistake_of_both_sides_is_found_by_the_whole_rows(
    recipe: Make, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step: parts that agree with the plain loop's parts may both be wrong."""
    monkeypatch.setattr(
        PlainLoop, "mistake", property(lambda loop: "positions", lambda loop, value: None), raising=False
    )
    fault = "parts-positions-restart"
    outcome = verify(recipe("ddp"), group=group, fault=fault, time_limit=200, stop_early=True, round_trip=False)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    stage, measure = outcome.difference[1:]
    assert (stage.name, measure.kind) == ("gradient", "gradient-reordered")
    assert {m.step for m in stage.wrong if m.kind == "gradient-reordered"} == set(range(5))


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


# ------------------------------------------------------------------ refusals, and what a model has to be


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


def test_other_weights_between_divided_layers_are_refused() -> None:
    config: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "model_type"}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config))
    model.model.layers[1].mlp.scale = torch.nn.RMSNorm(16)
    with pytest.raises(InputError, match=r"recipe: strategy\.mesh\.tensor: model\.layers\.1\.mlp\.scale has weights"):
        split_layers(model, Ranks(2, 0, lambda tensor: None, lambda tensor: [tensor]), "recipe")


def test_dropout_of_adapters_on_experts_is_refused_with_what_to_set(recipe: Make) -> None:
    """PEFT's own words name a class alone."""
    resolved = recipe("single", model={"config": MIXTRAL}, adapter={"r": 4, "dropout": 0.1})
    with pytest.raises(InputError, match=r"ParamWrapper .* set adapter\.dropout: 0, or adapter\.target_modules to lin"):
        prepare_model(resolved, 0)


def test_a_small_model_has_experts_for_every_rank() -> None:
    """`verify` makes models smaller, of four experts where they can be as few."""
    wide = MIXTRAL | {"hidden_size": 512, "num_hidden_layers": 8, "num_local_experts": 24}
    numbers = [twin_config(wide, experts=ranks)["num_local_experts"] for ranks in (1, 2, 3, 8, 12, 24)]
    assert numbers == [4, 4, 12, 8, 12, 24]
