"""Right runs are found right: no false alarm, and the evidence is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from covering import covering
from families import FAMILIES
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.cases.prepare import make_case, twin_recipe
from toolkit.verification.compare.measure import STAGES
from toolkit.verification.compare.replay import Reference
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import verify

LORA = {"r": 4, "dropout": 0.1}
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"]
SPREAD = {
    "zero1": "optimizer state held by this process",
    "zero2": "optimizer state held by this process",
    "zero3": "parameters split",
    "fsdp1": "weights held by this process",
    "fsdp2": "parameters split",
}


def message(outcome: Outcome) -> str:
    """Why it is not equivalent."""
    if outcome.difference:
        one, stage, measure = outcome.difference
        return f"{one.name}: {stage.name}: {measure}"
    return f"{outcome.failure} {outcome.unproven}"


def check(outcome: Outcome) -> None:
    assert outcome.verdict == "equivalent", message(outcome)
    for one in outcome.passes:
        assert [stage.name for stage in one.stages] == [name for name in STAGES if name not in ("data", "products")]
        assert all(stage.measures for stage in one.stages)
        gradient = next(stage for stage in one.stages if stage.name == "gradient")
        assert gradient.worst is not None
        assert one.reference is not None
        # A relative error of any one tensor's gradient above 1e-5 is caught, in 16 bits too.
        if one.reference.measured_because is None:
            assert 0 < (gradient.detection_limit or 0) < 1e-5
        assert gradient.worst.noise > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.nightly
def test_lora_in_bf16_recomputed_with_dropout(
    strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    resolved = recipe(strategy, precision="bf16", adapter=LORA, activation_checkpointing="full")
    outcome = verify(resolved, group=group, time_limit=120)
    check(outcome)
    assert [one.name for one in outcome.passes] == ["logic", "precision"]
    seen = {claim.claim for claim in outcome.passes[-1].claims}
    assert {"blocks recomputed", "collectives in the first step", "steps that clip, steps that do not"} <= seen
    assert {"windows uneven over ranks", "micro-batches without samples", "frozen tensors"} <= seen
    assert SPREAD.get(strategy, "processes connected") in seen


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "fsdp1"])
def test_dora(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    resolved = recipe(strategy, precision="bf16", adapter=LORA | {"method": "dora"})
    check(verify(resolved, group=group, time_limit=120))


def test_fsdp1_has_split_what_dora_reads(recipe: Callable[..., Resolved]) -> None:
    with pytest.raises(InputError, match=r"adapter\.method: dora .* fsdp2"):
        recipe("fsdp1", adapter=LORA | {"method": "dora"})


@pytest.mark.nightly
def test_one_process_of_fsdp1_names_its_frozen_weights(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup
) -> None:
    """In one process FSDP1 forgets the names of frozen parameters after a step: that is no change of a weight."""
    resolved = recipe("fsdp1", machine={"processes": 1}, adapter=LORA, precision="bf16")
    outcome = verify(resolved, group=lone_group, time_limit=120)
    check(outcome)
    frozen = [claim.seen for claim in outcome.passes[-1].claims if claim.claim == "frozen tensors"]
    assert frozen == ["21, 0 changed"]


@pytest.mark.nightly
def test_single(recipe: Callable[..., Resolved], lone_group: WorkerGroup) -> None:
    outcome = verify(recipe("single", precision="bf16-pure"), group=lone_group, time_limit=120)
    check(outcome)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_every_weight_in_bf16_alone(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    tied = recipe("ddp").recipe.model.config or {}
    model = {"config": tied | {"tie_word_embeddings": True}}
    outcome = verify(recipe(strategy, precision="bf16-pure", model=model), group=group, time_limit=120)
    check(outcome)
    dtypes = {c.claim: c.seen for c in outcome.passes[1].claims if c.claim.startswith("dtype")}
    assert dtypes["dtype of trained weights"] == dtypes["dtype of optimizer state"] == "bfloat16"


@pytest.mark.nightly
def test_a_forced_overflow_is_skipped(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    outcome = verify(recipe("fsdp2", precision="fp16"), group=group, time_limit=120)
    check(outcome)
    steps = outcome.passes[1].ranks[0].run.steps
    assert [step.skipped for step in steps] == [False, False, True, False, False]
    assert outcome.passes[0].ranks[0].run.steps[2].skipped is False


@pytest.mark.nightly
def test_fsdp1_puts_whole_weights_on_one_rank(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    """GPT-2's blocks begin with small weights, which lie on rank 0 alone: nothing there differs between ranks."""
    outcome = verify(recipe("fsdp1", model=FAMILIES["gpt2"]), group=group, time_limit=120, round_trip=False)
    assert outcome.verdict == "equivalent", message(outcome)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families(family: str, strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    values = FAMILIES[family]
    task = values.get("task", "causal-lm")
    data = {"format": "prompt-completion"} if task == "seq2seq-lm" else {}
    resolved = recipe(strategy, model=values, data=data, precision="bf16")
    outcome = verify(resolved, group=group, time_limit=200)
    assert outcome.verdict == "equivalent", message(outcome)


CROSSED = {
    "strategy": ["single", *STRATEGIES],
    "adapter": ["full", "lora"],
    "checkpointing": ["none", "full", "selective"],
    "precision": ["fp32", "bf16", "bf16-pure"],
    "accumulation": [1, 3],
    "tied": [False, True],
}
"""504 rows in full, 73 that hold any three values together."""


@pytest.mark.nightly
@pytest.mark.parametrize(tuple(CROSSED), covering(CROSSED, 3))
def test_no_false_alarm(
    strategy: str,
    adapter: str,
    checkpointing: str,
    precision: str,
    accumulation: int,
    tied: bool,
    recipe: Callable[..., Resolved],
    group: WorkerGroup,
    lone_group: WorkerGroup,
) -> None:
    config = dict(recipe("ddp").recipe.model.config or {}) | {"tie_word_embeddings": tied}
    resolved = recipe(
        strategy,
        model={"config": config},
        adapter=LORA if adapter == "lora" else None,
        activation_checkpointing=checkpointing,
        precision=precision,
        batch={"accumulation": accumulation},
    )
    outcome = verify(resolved, group=lone_group if strategy == "single" else group, time_limit=120)
    assert outcome.verdict == "equivalent", message(outcome)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp1", "fsdp2"])
@pytest.mark.nightly
def test_packed_rows(strategy: str, attention: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    model = {"config": recipe(strategy).recipe.model.config, "attention": attention}
    resolved = recipe(strategy, model=model, data={"packing": True}, adapter=LORA, precision="bf16")
    outcome = verify(resolved, group=group, time_limit=120)
    check(outcome)
    assert "packed-rows" in {claim.id for claim in outcome.passes[-1].claims}
    names = {m.tensor for stage in outcome.passes[0].stages for m in stage.measures}
    assert "loss of samples apart" in names
    assert any(name.endswith("lora_A.default.weight, samples apart") for name in names)


@pytest.mark.parametrize(("strategy", "kind"), [("fsdp1", "selective"), ("zero2", "full")])
@pytest.mark.nightly
def test_an_encoder_and_its_decoder_recomputed(
    strategy: str, kind: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """T5's decoder has a config of its own, whose cache a recomputed block would fill twice; and FSDP1 makes marks for
    the profiler while its blocks are computed again."""
    resolved = recipe(
        strategy,
        model=FAMILIES["t5"],
        data={"format": "prompt-completion"},
        adapter=LORA,
        activation_checkpointing=kind,
    )
    outcome = verify(resolved, group=group, time_limit=120, round_trip=False)
    assert outcome.verdict == "equivalent", message(outcome)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_model_that_lets_packed_samples_see_each_other_is_found(
    attention: str, recipe: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same leak in the run and in the plain loop: what both do alike is held against each sample alone."""
    from transformers import masking_utils

    model = {"config": recipe("single").recipe.model.config, "attention": attention}
    resolved = recipe("single", model=model, data={"packing": True})
    case = make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path)
    limits = []
    for leaks in (False, True):
        if leaks:
            monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
        reference = Reference(case)
        reference.measure_noise(1, reference.first)
        noise = reference.noise
        limits.append(max(apart / noise.tolerance(name) for name, apart in noise.apart[1].items()))
    assert limits[0] < 1 < 100 < limits[1]
