"""PEFT methods under the strategies, equal to the plain loop; and the faults of adapters that do not act.

``python -m tests.peft_methods`` verifies every method under every strategy; here are a few of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cases import every_case
from peft_methods import STRATEGIES, Row, cell, rows
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.adapter_methods import METHODS
from toolkit.recipe.resolve import Resolved
from toolkit.verification.cases.twin import twin_adapter
from toolkit.verification.matrix import what_caught
from toolkit.verification.run import verify

ROWS = {row.name: row for row in rows()}
QUICK = [
    ("vera", "zero3"),  # frozen projections that layers share
    ("lora, experts", "fsdp2"),  # weights of experts in one tensor
    ("prefix-tuning", "ddp"),  # keys and values
]


def check(row: Row, strategy: str, group: WorkerGroup) -> None:
    found = cell(row, strategy, group)
    assert found["verdict"] in ("equivalent", "refused"), found
    assert (found["verdict"] == "refused") == (row.name in REFUSED or refused_under(row, strategy)), found


REFUSED = {name for name, method in METHODS.items() if method.why_not is not None}


def refused_under(row: Row, strategy: str) -> bool:
    """What the table of methods says about FSDP, whose units gather their weights around a call."""
    method = METHODS[row.adapter["method"]]
    apart = not method.layers_called or row.name in ("lora, experts", "lora, new tokens")
    fsdp1 = strategy == "fsdp1" and apart
    return fsdp1 or (strategy in ("fsdp1", "fsdp2") and (method.shares or method.hooks))


@pytest.mark.parametrize(("name", "strategy"), QUICK)
def test_a_method_is_equal_to_the_plain_loop(name: str, strategy: str, group: WorkerGroup) -> None:
    check(ROWS[name], strategy, group)


PURE = [name for name in METHODS if name not in REFUSED]


@pytest.mark.nightly
@pytest.mark.parametrize("name", PURE)
def test_a_method_in_16_bits_alone(name: str, group: WorkerGroup) -> None:
    """Frozen projections (VeRA, RandLoRA) stayed in float32 under bf16-pure: the first forward ended in an error."""
    row = replace(ROWS[name], sections=ROWS[name].sections | {"precision": "bf16-pure"})
    check(row, "ddp", group)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if strategy != "single"])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_every_method_is_equal_to_the_plain_loop(name: str, strategy: str, group: WorkerGroup) -> None:
    check(ROWS[name], strategy, group)


@pytest.mark.parametrize(
    ("fault", "strategy", "stage", "diagnosis"),
    [
        ("prompt-dropped", "ddp", "forward", "prompt-missing"),
        ("experts-skipped", "single", "gradient", "tensors-do-not-train"),
        pytest.param("prompt-dropped", "zero3", "forward", "prompt-missing", marks=pytest.mark.nightly),
        pytest.param("experts-skipped", "fsdp2", "gradient", "tensors-do-not-train", marks=pytest.mark.nightly),
    ],
)
def test_an_adapter_that_does_not_act_is_found(
    fault: str,
    strategy: str,
    stage: str,
    diagnosis: str,
    recipe: Callable[..., Resolved],
    group: WorkerGroup,
    lone_group: WorkerGroup,
) -> None:
    workers = lone_group if strategy == "single" else group
    outcome = verify(recipe(strategy), group=workers, fault=fault, time_limit=120, stop_early=True, round_trip=False)
    assert outcome.verdict == "different"
    assert what_caught(outcome)[0] == stage
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == diagnosis


@every_case(
    ("adapter", "expected"),
    [
        ({"options": {"layers_to_transform": [10, 11]}}, {"layers_to_transform": [1]}),
        ({"options": {"layers_to_transform": [0, 11]}}, {"layers_to_transform": [0]}),
        ({"options": {"trainable_token_indices": [3, 903]}}, {"trainable_token_indices": [3, 112]}),
        ({"method": "c3a", "options": {}}, {"block_size": 16}),
        ({"method": "c3a", "options": {"block_size": 8}}, {"block_size": 8}),
        (
            {
                "method": "prompt-tuning",
                "options": {
                    "num_virtual_tokens": 50,
                    "prompt_tuning_init": "TEXT",
                    "prompt_tuning_init_text": "Be kind.",
                },
            },
            {"num_virtual_tokens": 8, "prompt_tuning_init": "RANDOM"},
        ),
        ({"options": {"init_lora_weights": "pissa"}, "r": 64}, {"init_lora_weights": "pissa"}),
    ],
)
def test_the_twin_has_the_adapter_in_sizes_that_it_can_have(adapter: dict[str, Any], expected: dict[str, Any]) -> None:
    values = {"method": "lora", "r": None, "path": "somewhere"} | adapter
    twin = twin_adapter(values, {"num_hidden_layers": 2, "vocab_size": 100 if "trainable" not in str(adapter) else 400})
    assert twin["options"] == expected
    assert twin["path"] is None
    assert twin["r"] == (8 if adapter.get("r") == 64 else None)
