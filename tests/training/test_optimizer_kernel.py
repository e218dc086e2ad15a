"""AdamW's kernel is the recipe's, and the step is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny import recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.optim.groups import make_optimizer
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve
from toolkit.verification.run import verify


@pytest.mark.parametrize(("kernel", "expected"), [("fused", (True, None)), ("foreach", (False, True))])
def test_the_kernel_is_the_recipes(kernel: str, expected: tuple[bool, bool | None]) -> None:
    import torch

    recipe = Recipe.model_validate(recipe_dict(Path("nowhere"), optimizer={"kernel": kernel}))
    weight = torch.nn.Parameter(torch.ones(3))
    [group] = make_optimizer({"w": weight}, frozenset(), frozenset(), recipe.optimizer, fused=True).param_groups
    assert (group["fused"], group["foreach"]) == expected


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_foreach_takes_the_same_step(strategy: str, group: WorkerGroup) -> None:
    values = recipe_dict(Path("nowhere"), strategy={"name": strategy}, optimizer={"kernel": "foreach"})
    values["batch"] = {"micro_size": 2, "accumulation": 3}
    outcome = verify(resolve(Recipe.model_validate(values), device="cpu"), group=group, time_limit=200)
    assert outcome.verdict == "equivalent", (outcome.difference, outcome.failure)
