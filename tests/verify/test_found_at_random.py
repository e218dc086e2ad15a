"""Recipes that ended otherwise than they should when they were drawn at random, smaller, and one beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.cases import samples as samples_module
from toolkit.verification.cases.case import FULL_WINDOWS, Case
from toolkit.verification.cases.prepare import clip_between, clip_by_trial, make_case, twin_recipe
from toolkit.verification.cases.samples import expected_windows, ragged_samples, uneven
from toolkit.verification.run import verify

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
CASES: dict[str, dict[str, Any]] = {
    # One key for all heads, which its config does not call num_key_value_heads.
    "prefix-on-falcon": {
        "model": {"config": {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"model_type": "falcon"}},
        "adapter": {"method": "prefix-tuning", "options": {"num_virtual_tokens": 4}},
    },
    # A mean over the micro-batch: the plain loop weighted it by labels, of which the first is no prediction.
    "balance-of-experts": {
        "model": {
            "config": SMALL
            | {
                "model_type": "mixtral",
                "num_key_value_heads": 2,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "output_router_logits": True,
            }
        },
    },
    # The MLP beside the first block's attention has no gradient, and is not recomputed.
    "float8-side-by-side": {
        "model": {"config": SMALL | {"model_type": "cohere2", "num_key_value_heads": 2, "sliding_window": 8}},
        "adapter": {"r": 2, "target_modules": ["q_proj", "k_proj"]},
        "precision": "bf16",
        "fp8": True,
        "activation_checkpointing": "full",
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.nightly
def test_it_is_equivalent(case: str, recipe: Callable[..., Resolved], lone_group: WorkerGroup) -> None:
    outcome = verify(recipe("single", **CASES[case]), group=lone_group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.nightly
def test_a_4_bit_base_merges_where_few_positions_are_left(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup
) -> None:
    pytest.importorskip("bitsandbytes")
    config = SMALL | {"model_type": "roberta", "max_position_embeddings": 64, "pad_token_id": 1}
    model = {"task": "sequence-classification", "num_labels": 3, "config": config}
    resolved = recipe("single", model=model, adapter={"method": "qlora", "r": 2}, data={"max_length": 48})
    outcome = verify(resolved, group=lone_group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    [exported] = [one for one in outcome.passes[0].stages if one.name == "round-trip"]
    assert [one for one in exported.measures if "merged" in one.tensor]


def test_a_limit_is_tried_before_it_is_taken(
    recipe: Callable[..., Resolved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def norms(case: Case) -> list[float]:
        limit = case.recipe["optimizer"]["max_grad_norm"]
        tried.append(limit)
        return [0.9 * limit, 1.5 * limit] if limit == pytest.approx(0.5) else [2 * limit, 3 * limit]

    resolved = recipe("single", optimizer={"max_grad_norm": 1.0})
    case = make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path)
    monkeypatch.setattr("toolkit.verification.cases.prepare._plain_norms", norms)
    chosen = clip_by_trial(case, [0.25, 1.0, 4.0])
    assert tried == pytest.approx([0.5, 2.0])
    assert chosen.recipe["optimizer"]["max_grad_norm"] == pytest.approx(0.5)
    assert clip_by_trial(case, [1.0, 4.0]) == case, "all steps clip with the only limit there is"


def test_a_run_whose_second_limit_fits_no_better_gets_one_that_was_tried(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two limits are as bad as can be."""
    taken = []

    def too_low(case: Case, norms: Any = None) -> Case:
        taken.append("low")
        return clip_between(case, [1e-6, 1e-6])

    def by_trial(case: Case, norms: list[float]) -> Case:
        taken.append("tried")
        return clip_by_trial(case, norms)

    monkeypatch.setattr("toolkit.verification.run.exercise_clipping", too_low)
    monkeypatch.setattr("toolkit.verification.run.clip_between", too_low)
    monkeypatch.setattr("toolkit.verification.run.clip_by_trial", by_trial)
    outcome = verify(recipe("single"), group=lone_group, time_limit=60, round_trip=False)
    assert outcome.verdict == "equivalent", (outcome.failure, outcome.unproven)
    assert taken == ["low", "low", "tried"]


def test_samples_are_drawn_again_where_every_window_is_even(recipe: Callable[..., Resolved]) -> None:
    """A row for two ranks that divide it: with this seed both halves have as many labels in each window."""
    config = SMALL | {"model_type": "granitemoe", "num_key_value_heads": 2, "num_local_experts": 4}
    resolved = recipe(
        "zero3",
        model={"config": config},
        strategy={"mesh": {"context": 2}},
        data={"max_length": 48, "format": "messages"},
        batch={"micro_size": 1, "accumulation": 1},
        run={"seed": 261},
    )
    first = samples_module._drawn(resolved, config, FULL_WINDOWS, 0)
    assert uneven(expected_windows(first, resolved, FULL_WINDOWS + 1), resolved) == 0
    chosen = ragged_samples(resolved, config, FULL_WINDOWS)
    assert uneven(expected_windows(chosen, resolved, FULL_WINDOWS + 1), resolved) > 0
