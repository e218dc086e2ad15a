"""Weights that no output of a model of text depends on: those that nothing ties to the tables in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from families import EVERY_FAMILY, HYBRIDS
from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.model.load import load_base
from toolkit.model.unreached import unreached
from toolkit.recipe.resolve import Resolved
from toolkit.verification.run import verify

BART = EVERY_FAMILY["bart"]["config"] | {"num_labels": 3}


def bart(tie: bool, task: str = "seq2seq-lm") -> dict[str, Any]:
    """``recipe``'s sections; encoder and decoder have tables of their own unless ``tie``."""
    labels = {"num_labels": 3} if task == "sequence-classification" else {}
    form = "text" if labels else "prompt-completion"
    return {
        "model": {"task": task, "config": BART | {"tie_word_embeddings": tie}} | labels,
        "data": {"format": form, "max_length": 48},
    }


@pytest.mark.parametrize("task", ["seq2seq-lm", "sequence-classification"])
def test_a_table_that_nothing_shares_is_not_reached(task: str, recipe: Callable[..., Resolved]) -> None:
    for tie in (False, True):
        resolved = recipe("ddp", **bart(tie, task))
        found = unreached(load_base(resolved), resolved)
        assert found == ([] if tie else ["model.shared.weight"]), tie


@pytest.mark.parametrize("strategy", nightly_but(["fsdp1", "ddp", "zero2", "zero3", "fsdp2"], "fsdp1"))
def test_it_trains_as_the_plain_loop(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    """DDP ended in «did not receive gradient», and fsdp2 had no state where the plain loop had one."""
    resolved = recipe(strategy, precision="bf16", **bart(tie=False))
    outcome = verify(resolved, group=group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "fsdp2"], "ddp"))
def test_an_adapter_that_the_model_passes_by_is_not_trained(
    strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    """Jamba multiplies by the weight of ``dt_proj`` itself. DDP ended in «did not receive gradient»."""
    resolved = recipe(strategy, model=HYBRIDS["jamba"], adapter={"r": 2, "target_modules": "all-linear"})
    outcome = verify(resolved, group=group, round_trip=False, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure, outcome.unproven)
