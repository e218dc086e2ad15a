"""Calibration: what was timed is what is predicted for the cell that it was timed on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cases import every_case
from plan.cells import Cell
from toolkit.errors import InputError, RunFailed
from toolkit.planning.calibrate import Speeds, applied, calibrated, replicated
from toolkit.planning.hardware import Device
from toolkit.planning.mechanics import Step, variants
from toolkit.planning.predict import Planner
from toolkit.planning.time import Rates, step_seconds
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies

STRATEGIES = tuple(name for name, strategy in strategies().items() if strategy.traits.distributed)

HERE = Device("cpu", 8, 0, 0, 0, 0, "this machine")
TIMED = Speeds(
    rows=Step(0.45, 0.55, 0.1), large=0.2, small=0.001, alone=Step(0.01, 0.02, 0.1),
    under={
        "ddp": Step(0.01, 0.25, 0.1), "zero1": Step(0.01, 0.35, 0.15), "zero2": Step(0.21, 0.30, 0.15),
        "zero3": Step(0.41, 0.45, 0.07), "fsdp1": Step(0.51, 0.55, 0.06), "fsdp2": Step(0.61, 0.65, 0.08),
    },
)  # fmt: skip


def recipe(strategy: str) -> Resolved:
    return resolve(Recipe.model_validate(Cell("llama", False, strategy, "none", 64).recipe()))


@every_case("name", STRATEGIES)
def test_timed_parts_come_back_as_predicted_ones(name: str) -> None:
    asked = recipe(name)
    device, rates = applied(TIMED, asked, replicated(asked, 2), HERE, Rates())
    planner = Planner.of(asked, 64)
    found = step_seconds(asked, planner.skeleton.holdings, planner.segments("none", 2, "autocast"), device, rates)
    assert found is not None
    # A step of two micro-batches: whole rows' arithmetic, and what the strategy took for itself with a few tokens.
    assert TIMED.alone is not None
    itself = TIMED.under[name].whole - TIMED.alone.first - TIMED.alone.last
    assert found.total == pytest.approx(TIMED.rows.first + TIMED.rows.last + itself)
    more = dataclasses.replace(asked, accumulation=3)
    longer = step_seconds(more, planner.skeleton.holdings, planner.segments("none", 2, "autocast"), device, rates)
    assert longer is not None
    each = 0.5 + TIMED.under[name].first - TIMED.alone.first
    assert longer.total - found.total == pytest.approx(each)


def test_every_strategy_that_takes_the_recipe_is_timed_with_the_asked_ones_settings() -> None:
    values = recipe("fsdp2").recipe.model_dump(exclude_unset=True)
    values["strategy"] = {"name": "fsdp2", "reshard_after_forward": False}
    asked = resolve(Recipe.model_validate(values))
    found = variants(replicated(asked, 2), asked)
    assert tuple(found) == STRATEGIES
    assert not found["fsdp2"].strategy.reshard_after_forward
    assert {one.batch.accumulation for one in found.values()} == {2}


def test_a_model_that_does_not_fit_whole_is_not_tried(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--calibrate: .* whole model in each process"):
        calibrated(recipe("zero3"), dataclasses.replace(HERE, memory=0.01), Rates(), tmp_path / "log")


@pytest.mark.usefixtures("launches")
def test_this_machine_is_timed(tmp_path: Path) -> None:
    asked = resolve(Recipe.model_validate(Cell("llama", False, "single", "none", 64).recipe()))
    device, rates = calibrated(asked, HERE, Rates(), tmp_path / "log")
    assert device.bf16 > 0
    assert rates.compute == pytest.approx(1.0)
    assert not rates.overlap
    assert rates.own == {}


@pytest.mark.usefixtures("launches")
def test_a_rank_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    """Flash attention is not here: the plan knows its memory, the ranks cannot run it."""
    asked = recipe("ddp")
    model = asked.recipe.model.model_copy(update={"attention": "flash_attention_2"})
    asked = dataclasses.replace(asked, recipe=asked.recipe.model_copy(update={"model": model}))
    with pytest.raises(RunFailed, match=r"--calibrate: rank \d ended: .*; its output: ") as caught:
        calibrated(asked, HERE, Rates(), tmp_path / "log")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("launches")
@pytest.mark.nightly
def test_strategies_take_time_of_their_own(tmp_path: Path) -> None:
    _, rates = calibrated(recipe("zero2"), HERE, Rates(), tmp_path / "log")
    assert set(rates.own) == set(STRATEGIES)
    # A gather of every weight for every micro-batch is not free on any machine; a replica sends nothing before the end.
    assert rates.own["zero3"][0] > rates.own["ddp"][0]
