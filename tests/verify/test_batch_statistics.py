"""Batch normalisation under the strategies: equal to the plain loop over all ranks' micro-batches, and detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from media import RESNET
from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.cases.prepare import make_case, twin_recipe
from toolkit.verification.compare.replay import Reference
from toolkit.verification.run import verify

Make = Callable[..., Resolved]


def resnet(**model: Any) -> dict[str, Any]:
    return {
        "model": {"config": RESNET, "task": "image-classification", "num_labels": 3, **model},
        "data": {"format": "image"},
    }


@pytest.mark.parametrize(
    ("strategy", "sections"),
    [
        ("ddp", {"activation_checkpointing": "full"}),
        ("ddp", {"precision": "bf16"}),
        ("zero1", {"precision": "bf16"}),
        ("zero2", {"precision": "bf16"}),
        ("zero3", {"precision": "bf16", "activation_checkpointing": "selective"}),
        ("fsdp1", {"precision": "bf16"}),
        ("fsdp2", {"precision": "bf16"}),
        ("fsdp2", {"activation_checkpointing": "full"}),
    ],
)
@pytest.mark.nightly
def test_it_is_equal_to_the_plain_loop(
    strategy: str, sections: dict[str, Any], recipe: Make, group: WorkerGroup
) -> None:
    outcome = verify(recipe(strategy, **resnet(), **sections), group=group, time_limit=240)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
    assert not outcome.notes
    statistics = [m for one in outcome.passes for stage in one.stages for m in stage.measures
                  if m.kind == "running-statistic"]  # fmt: skip
    assert {m.phase for m in statistics} == {"", "reloaded", "resumed"}


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero3", "fsdp2"], "ddp"))
def test_statistics_of_each_rank_are_reported_apart(strategy: str, recipe: Make, group: WorkerGroup) -> None:
    outcome = verify(recipe(strategy, **resnet()), group=group, fault="batch-norm-local", round_trip=False)
    assert outcome.verdict == "different"
    assert outcome.difference is not None
    assert outcome.difference[1].name == "forward"
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.id == "batch-statistics-of-each-rank"


def test_statistics_of_each_rank_are_reported_where_the_recipe_asks_for_them(recipe: Make, group: WorkerGroup) -> None:
    outcome = verify(recipe("ddp", **resnet(batch_norm="local")), group=group, round_trip=False)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure)
    assert outcome.notes == [
        "model.batch_norm: local: each of 2 ranks normalises its own micro-batch, here as in the plain loop; this is "
        "another training than the full batch's"
    ]


@pytest.mark.nightly
def test_frozen_statistics_are_equal_too(recipe: Make, group: WorkerGroup) -> None:
    outcome = verify(recipe("fsdp2", precision="bf16", **resnet(batch_norm="frozen")), group=group)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure)


def test_the_plain_loop_is_torchs_over_the_rows_of_all_ranks(recipe: Make, tmp_path: Any) -> None:
    """By the gradient of a window: transformers' own model over each micro-batch of all ranks together."""
    resolved = recipe("ddp", **resnet())
    case = make_case(twin_recipe(resolved, full_size=False), resolved, "logic", tmp_path)
    reference = Reference(case)
    losses, gradients = reference.gradient(0, reference.first)
    from toolkit.model.load import load_base

    model = load_base(case.resolved()).train()
    window = reference.windows[0]
    tokens = sum(micro.supervised for _, micro in window)
    total = 0.0
    for number in sorted({micro.micro for _, micro in window}):
        together = [micro.tensors for _, micro in window if micro.micro == number]
        logits = model(pixel_values=torch.cat([one["pixel_values"] for one in together])).logits
        labels = torch.cat([one["labels"] for one in together])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        (loss / tokens).backward()
        total += loss.item()
    assert sum(losses) == pytest.approx(total, rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-6:
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-4, name  # convolutions of other sizes, through two layers of division by a deviation
    for name, value in model.named_buffers():
        seen = reference.statistics()[name]
        assert torch.allclose(seen.double(), value.double(), rtol=1e-5, atol=1e-6), name
