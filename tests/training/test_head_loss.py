"""The loss without the logits: equal, smaller, at work under every strategy, and refused where it would be another."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from cases import every_case
from tiny import LLAMA, recipe_dict
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.model.head_loss import linear_cross_entropy
from toolkit.model.loss_terms import CHUNK_BYTES
from toolkit.planning.live import LiveBytes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.training.preparation import prepare_model
from toolkit.verification.run import verify


def resolved_with(**sections: Any) -> Resolved:
    return resolve(Recipe.model_validate(recipe_dict(Path("nowhere"), **sections)), "recipe", device="cpu")


def plain_loss(hidden: Any, weight: Any, bias: Any, targets: Any) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias).float(), targets, reduction="sum")


@every_case(("autocast", "biased"), product([False, True], [False, True]))
def test_loss_and_gradients_are_those_of_the_logits(
    biased: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 50 * 7)  # seven rows to a chunk, the last one short
    torch.manual_seed(0)
    tensors = [torch.randn(40, 16), torch.randn(50, 16)] + ([torch.randn(50)] if biased else [])
    targets = torch.randint(0, 50, (40,))
    targets[::3] = -100
    found = []
    for loss_of in (plain_loss, linear_cross_entropy):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(leaves[0], leaves[1], leaves[2] if biased else None, targets)
        (loss * 0.25).backward()
        assert loss.dtype == torch.float32
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for seen, right in zip(*reversed(found), strict=True):
        # fp32: sums in another order; bf16: 8 bits of mantissa, the same rounded inputs on both sides.
        assert (seen - right).norm() / right.norm() < (4e-3 if autocast else 1e-6)


def test_frozen_heads_and_evaluation_need_no_gradient() -> None:
    hidden, weight, targets = torch.randn(9, 4, requires_grad=True), torch.randn(11, 4), torch.arange(9)
    linear_cross_entropy(hidden, weight, None, targets).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, None, targets).requires_grad


def peak(loss: str, length: int) -> int:
    config = LLAMA | {"vocab_size": 16384, "max_position_embeddings": 2048}
    resolved = resolved_with(model={"config": config}, loss=loss)
    prepared = prepare_model(resolved, 0)
    ids = torch.randint(3, 16384, (1, length))
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    from toolkit.training.loss import loss_sum

    with LiveBytes() as live:
        loss_sum(prepared.model, prepared.model.config, tensors, "causal-lm").backward()
    return live.peak


def test_memory_does_not_grow_with_vocabulary_times_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 16384 * 64)
    logits = 4 * 16384  # bytes of one token's, in float32
    plain, fused = ([peak(loss, length) for length in (512, 1536)] for loss in ("plain", "fused"))
    # Logits, their softmax and its gradient: two of them at once at least.
    assert plain[1] - plain[0] > 2 * logits * 1024
    assert fused[1] - fused[0] < 0.1 * logits * 1024
    assert fused[1] < 0.35 * plain[1]


@every_case(
    ("sections", "expected"),
    [
        (
            {"model": {"config": LLAMA | {"model_type": "gemma2"}}},
            "changes the logits after the head: logits = logits /",
        ),
        ({"model": {"config": LLAMA, "task": "sequence-classification"}}, "requires model.task: causal-lm"),
        ({"precision": "fp16"}, "use bf16"),
        ({"adapter": {"target_modules": ["q_proj", "lm_head"]}}, "contains lm_head"),
    ],
)
def test_what_it_cannot_be_is_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match="loss: fused") as caught:
        resolved_with(loss="fused", **sections)
    assert expected in str(caught.value)


def test_an_adapter_that_a_pattern_puts_on_the_head_is_refused() -> None:
    resolved = resolved_with(loss="fused", adapter={"target_modules": ".*(q_proj|lm_head)"})
    with pytest.raises(InputError, match="an adapter wraps it"):
        prepare_model(resolved, 0)


TIED = LLAMA | {"tie_word_embeddings": True, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("ddp", {"adapter": {"r": 4, "modules_to_save": ["lm_head"]}, "precision": "bf16"}),
        pytest.param("zero2", {"model": {"config": TIED}}, marks=pytest.mark.nightly),
        pytest.param("zero3", {"model": {"config": TIED}, "data": {"packing": True}}, marks=pytest.mark.nightly),
        pytest.param(
            "zero3",
            {"adapter": {"r": 4}, "precision": "bf16", "activation_checkpointing": "full"},
            marks=pytest.mark.nightly,
        ),
        ("fsdp1", {"model": {"config": TIED}}),
        pytest.param("fsdp2", {"precision": "bf16"}, marks=pytest.mark.nightly),
        ("fsdp2", {"model": {"config": TIED}, "data": {"packing": True}}),
    ],
)
def test_it_is_the_same_under_every_strategy(strategy: str, sections: dict[str, Any], group: WorkerGroup) -> None:
    resolved = resolved_with(strategy={"name": strategy}, batch={"accumulation": 3}, loss="fused", **sections)
    outcome = verify(resolved, group=group, time_limit=240)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    claims = {claim.claim: claim.ok for one in outcome.passes for claim in one.claims}
    assert claims["losses without logits"]


def test_a_fused_loss_that_is_never_reached_is_not_proven() -> None:
    from toolkit.verification.compare import engagement
    from toolkit.verification.record.trace import RankTrace

    resolved = resolved_with(loss="fused")
    [claim] = engagement._fused([RankTrace(0, forwards=3, fused=3), RankTrace(1, forwards=3)], resolved)
    assert not claim.ok
