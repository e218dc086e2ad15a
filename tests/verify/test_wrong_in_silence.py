"""Defects of the packages beneath that train something else without a word: the recipes that led there are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from families import EVERY_FAMILY
from nights import nightly_but
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify


@pytest.mark.parametrize("family", nightly_but(["qwen2", "gpt_neox"], "qwen2"))
def test_selective_checkpointing_of_linear_layers_with_a_bias_under_zero3(
    family: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """DeepSpeed adds the bias in place to the product that selective checkpointing has kept."""
    resolved = recipe("zero3", model=EVERY_FAMILY[family], activation_checkpointing="selective")
    outcome = verify(resolved, group=group, time_limit=120, round_trip=False)
    assert outcome.verdict == "equivalent", outcome.difference


@pytest.mark.parametrize("strategy", nightly_but(["fsdp2", "fsdp1", "zero3", "zero2"], "zero3"))
def test_a_rotary_table_in_float32_stays_so(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    """FSDP rounds what a block is given to its compute dtype by default. DeepSpeed casts the root's."""
    resolved = recipe(strategy, model=EVERY_FAMILY["olmo2"], precision="bf16")
    outcome = verify(resolved, group=group, time_limit=120, round_trip=False)
    assert outcome.verdict == "equivalent", outcome.difference


@pytest.mark.parametrize(
    ("fault", "strategy", "stage", "diagnosis"),
    [
        ("recompute-bias-twice", "zero3", "gradient", "bias-added-twice"),
        ("inputs-cast", "fsdp2", "forward", "block-inputs-cast"),
        pytest.param("inputs-cast", "fsdp1", "forward", "block-inputs-cast", marks=pytest.mark.nightly),
    ],
)
def test_without_the_workaround_it_is_found_and_named(
    fault: str, strategy: str, stage: str, diagnosis: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    outcome = verify(recipe(strategy), group=group, fault=fault, time_limit=120, stop_early=True)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == diagnosis
    assert what_caught(outcome)[0] == stage


def test_a_rank_that_cannot_use_its_recipe_refuses_it(recipe: Callable[..., Resolved], lone_group: WorkerGroup) -> None:
    """PEFT finds this only when the adapter is added, and without clipping no plain loop runs before the ranks do."""
    adapter = {"r": 4, "modules_to_save": ["lm_head"], "target_modules": ["lm_head"]}
    resolved = recipe("single", adapter=adapter, optimizer={"max_grad_norm": None})
    with pytest.raises(InputError, match="adapter"):
        verify(resolved, group=lone_group, time_limit=120, round_trip=False)
