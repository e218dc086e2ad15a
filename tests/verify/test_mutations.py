"""Mutations at random sizes: everything above the detection limit is found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from cases import every_case
from nights import nightly_but
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.faults.mutation import KINDS, Mutation
from toolkit.verification.run import verify
from verify.mutants import mutate


def test_mutations_above_the_detection_limit_are_found(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup
) -> None:
    mutants = mutate(recipe("single"), lone_group, 12, seed=0)
    must = [mutant for mutant in mutants if mutant.must_die]
    assert len(must) >= 6
    assert [mutant for mutant in must if not mutant.killed] == []


@every_case(("size", "kind"), product([1e-5, 1e-3, 1e-1], ["scale", "noise", "drop", "round"]))
def test_a_mutation_is_as_large_as_it_says(kind: str, size: float) -> None:
    """Else one that is too small to be found would count as one that was missed."""
    draw = torch.Generator().manual_seed(0)
    right = torch.randn(64, 48, generator=draw) * torch.rand(64, 1, generator=draw)
    wrong = Mutation(f"gradient {kind}", size, 3)._change(right)
    error = ((wrong.double() - right.double()).norm() / right.double().norm()).item()
    assert size * (1 - 1e-3) < error < size * 2


@pytest.mark.parametrize("strategy", nightly_but(["ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2"], "fsdp2"))
@pytest.mark.parametrize("kind", nightly_but(["scale", "noise", "drop", "round"], "round"))
def test_a_fifth_of_a_percent_of_one_gradient_in_16_bits_alone_is_found(
    strategy: str, kind: str, recipe: Callable[..., Resolved], group: WorkerGroup
) -> None:
    mutation = {"kind": f"gradient {kind}", "size": 2e-3, "seed": 5, "only": "precision"}
    resolved = recipe(strategy, precision="bf16", activation_checkpointing="full")
    outcome = verify(resolved, group=group, mutation=mutation, round_trip=False, time_limit=120)
    assert not outcome.passes[0].fault_reached
    assert outcome.passes[1].fault_reached
    assert outcome.failure is None
    assert outcome.difference is not None
    assert (outcome.difference[0].name, outcome.difference[1].name) == ("precision", "gradient")


@pytest.mark.weekly
@pytest.mark.timeout(1500)  # 60 mutants of about 4 s each, twice that on a busy machine
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_under_every_strategy(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    mutants = mutate(recipe(strategy), group, 60, seed=1)
    must = [mutant for mutant in mutants if mutant.must_die]
    assert {mutant.kind for mutant in must} == set(KINDS)
    assert sum(mutant.killed for mutant in must) >= 0.99 * len(must)
