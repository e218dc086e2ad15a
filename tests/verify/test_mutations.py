"""Mutations at random sizes: everything above the detection limit is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verify.mutations import KINDS, mutate


def test_mutations_above_the_detection_limit_are_found(
    recipe: Callable[..., Resolved], lone_group: WorkerGroup
) -> None:
    mutants = mutate(recipe("single"), lone_group, 12, seed=0)
    must = [mutant for mutant in mutants if mutant.must_die]
    assert len(must) >= 6
    assert [mutant for mutant in must if not mutant.killed] == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_under_every_strategy(strategy: str, recipe: Callable[..., Resolved], group: WorkerGroup) -> None:
    mutants = mutate(recipe(strategy), group, 60, seed=1)
    must = [mutant for mutant in mutants if mutant.must_die]
    assert {mutant.kind for mutant in must} == set(KINDS)
    assert sum(mutant.killed for mutant in must) >= 0.99 * len(must)
