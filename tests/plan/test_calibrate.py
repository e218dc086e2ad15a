"""Calibration: what was timed is what is predicted for the cell that it was timed on."""

from __future__ import annotations

import pytest

from plan.cells import Cell
from toolkit.plan.calibrate import _LARGE, Speeds, _applied, _replicated, calibrated
from toolkit.plan.hardware import Device
from toolkit.plan.predict import Planner
from toolkit.plan.time import Rates, step_seconds
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve

HERE = Device("cpu", 8, 0, 0, 0, 0, "this machine")


def test_timed_parts_come_back_as_predicted_ones() -> None:
    asked = resolve(Recipe.model_validate(Cell("llama", False, "ddp", "none", 64).recipe()))
    speeds = Speeds(micro=0.5, update=0.1, large=0.2, small=0.001)
    device, rates = _applied(speeds, _replicated(asked, 2), HERE, Rates(), 64)
    planner = Planner.of(asked, 64)
    holdings = planner.skeleton.holdings
    found = step_seconds(asked, holdings, planner.segments("none", 2, "autocast"), device, rates)
    assert found is not None
    assert (found.compute, found.optimizer) == (pytest.approx(1.0), pytest.approx(0.1))
    sent = 0.199 * holdings.elements(True) / _LARGE + 0.001
    assert found.exposed == pytest.approx(sent, rel=0.01)  # nothing hides on a CPU


@pytest.mark.group
def test_this_machine_is_timed() -> None:
    asked = resolve(Recipe.model_validate(Cell("llama", False, "single", "none", 64).recipe()))
    device, rates = calibrated(asked, HERE, Rates())
    assert device.bf16 > 0
    assert rates.compute == pytest.approx(1.0)
    assert not rates.overlap
