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


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("zero3", LORA),
        ("fsdp2", LORA | TIED),
        ("ddp", LORA),
        ("zero1", LORA | TIED),
        ("zero2", LORA),
        ("fsdp2", LORA),
        ("fsdp1", WHOLE),
        ("zero3", WHOLE),
        ("fsdp1", {}),
        ("fsdp2", {"loss": "fused"}),
        ("zero3", TIED),
        ("ddp", {"adapter": {"r": 4, "method": "qlora"}}),
    ],
)
@pytest.mark.nightly
def test_equivalent(strategy: str, sections: Any, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    outcome = verify(recipe(strategy, precision="bf16", **(NEW | sections)), group=group, time_limit=300)
    check(outcome)


def test_rows_that_get_no_gradient_are_found(recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    outcome = verify(recipe("zero2", **(NEW | LORA)), group=group, fault="new-tokens-frozen", time_limit=300)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert outcome.difference[1].name in ("gradient", "update", "engagement")
