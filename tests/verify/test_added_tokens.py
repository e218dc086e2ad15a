"""New tokens are proven under the strategies: in full training, and beside an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_equivalent import check

from tiny import LLAMA
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.run import verify

NEW: dict[str, Any] = {"tokenizer": {"add_tokens": ["<a>", "<b>"], "add_special_tokens": ["<|im_end|>"]}}
LORA = {"adapter": {"r": 4}}
WHOLE = {"adapter": {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}}
TIED = {"model": {"config": LLAMA | {"tie_word_embeddings": True}}}
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        pytest.param("zero3", LORA, marks=nightly),
        ("fsdp2", LORA | TIED),
        pytest.param("ddp", LORA, marks=nightly),
        pytest.param("zero1", LORA | TIED, marks=nightly),
        pytest.param("zero2", LORA, marks=nightly),
        pytest.param("fsdp2", LORA, marks=nightly),
        pytest.param("fsdp1", WHOLE, marks=nightly),
        pytest.param("zero3", WHOLE, marks=nightly),
        pytest.param("fsdp1", {}, marks=nightly),
        pytest.param("fsdp2", {"loss": "fused"}, marks=nightly),
        pytest.param("zero3", TIED, marks=nightly),
        pytest.param("ddp", {"adapter": {"r": 4, "method": "qlora"}}, marks=nightly),
    ],
)
def test_equivalent(strategy: str, sections: Any, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    outcome = verify(recipe(strategy, precision="bf16", **(NEW | sections)), group=group, time_limit=300)
    check(outcome)


def test_rows_that_get_no_gradient_are_found(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    outcome = verify(recipe("zero2", **(NEW | LORA)), group=group, fault="new-tokens-frozen", time_limit=300)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert outcome.difference[1].name in ("gradient", "update", "engagement")
