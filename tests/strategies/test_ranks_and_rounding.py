"""DeepSpeed's ZeRO-2 divides by the ranks in 16 bits where it scatters: not for numbers that 16 bits divide exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import every_case
from tiny import recipe_dict
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategy_of
from toolkit.verification.run import verify


@every_case(
    ("strategy", "processes", "nodes", "scatters"),
    [("zero2", 2, 1, True), ("zero2", 4, 2, True), ("zero2", 3, 1, False), ("zero2", 3, 2, False),
     ("zero1", 3, 1, True), ("zero3", 3, 1, True)],
)  # fmt: skip
def test_scattering_is_off_where_it_rounds(
    strategy: str, processes: int, nodes: int, scatters: bool, tmp_path: Path
) -> None:
    machine = {"device": "cpu", "processes": processes, "nodes": nodes}
    recipe = recipe_dict(tmp_path, strategy={"name": strategy}, machine=machine)
    resolved = resolve(Recipe.model_validate(recipe), "r", device="cpu")
    config = strategy_of(resolved).deepspeed_config(resolved)
    assert config is not None
    assert config["zero_optimization"]["reduce_scatter"] == scatters


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("offload", ["none", pytest.param("optimizer", marks=pytest.mark.nightly)])
def test_three_ranks_of_zero2_are_equal_to_the_plain_loop(offload: str, tmp_path: Path) -> None:
    recipe = recipe_dict(
        tmp_path,
        strategy={"name": "zero2", "offload": offload},
        machine={"device": "cpu", "processes": 3},
        tokenizer={"path": "none"},
        precision="bf16",
    )
    resolved = resolve(Recipe.model_validate(recipe), "r", device="cpu")
    with WorkerGroup(3) as three:
        outcome = verify(resolved, group=three, time_limit=200, round_trip=False)
    assert outcome.verdict == "equivalent", outcome.difference
    gradient = next(stage for stage in outcome.passes[1].stages if stage.name == "gradient")
    assert 0 < (gradient.detection_limit or 0) < 1e-5
