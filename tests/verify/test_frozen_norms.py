"""A LayerNorm with frozen 16-bit weights takes what a float32 embedding gives, also on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.model.load import set_dtypes
from toolkit.recipe.resolve import Resolved
from toolkit.verification.run import verify

GPTJ = {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64,
        "rotary_dim": 4, "tie_word_embeddings": True}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tied-head-trains": {"adapter": {"r": 4, "modules_to_save": ["lm_head"]}},
    "norms-frozen": {"model": {"freeze": ["ln_"]}},
    "biases-frozen": {"model": {"freeze": ["bias$"]}},
}


def test_torch_takes_no_16_bit_weights_beside_float32() -> None:
    """Were it otherwise, ``_norm_in_its_inputs_dtype`` could go."""
    norm = nn.LayerNorm(8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="mixed dtype"):
        norm(torch.randn(2, 8))


def test_only_norms_with_frozen_weights_are_changed() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    model[1].weight.requires_grad_(False)
    set_dtypes(model, "float32", "bfloat16")
    assert ["forward" in vars(module) for module in model] == [False, True]
    x = torch.randn(2, 8)
    right = nn.functional.layer_norm(x, (8,), model[1].weight.float(), model[1].bias)
    assert torch.equal(model[1](x), right)
    assert model[1](x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("case", nightly_but(CASES, "tied-head-trains"))
def test_they_train_as_the_plain_loop(case: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    sections = dict(CASES[case])
    model = {"config": GPTJ, "attention": "eager"} | sections.pop("model", {})
    outcome = verify(recipe("ddp", model=model, precision="bf16", **sections), group=group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
