"""Predicted and measured seconds per step on this machine; ``PYTHONPATH=tests python -m plan.times`` prints them.

A machine with other work on it is never twice as fast: calibration and measurement take turns, and medians are told.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import warnings
from typing import Any

from plan.cells import LLAMA, LORA

MODEL = LLAMA | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8000}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
LENGTH = 128


def recipe(strategy: str, lora: bool = False) -> dict[str, Any]:
    return {
        "model": {"config": MODEL},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": LENGTH},
        "batch": {"micro_size": 2, "accumulation": 2},
        "adapter": LORA if lora else None,
        "precision": "fp32",
        "activation_checkpointing": "none",
        "strategy": {"name": strategy},
        "machine": {"device": "cpu", "processes": 2},
        "run": {"max_steps": 2, "save_every": 0, "eval_every": 0},
    }


def measured(values: dict[str, Any]) -> float:
    """Runs on a rank: the median second of all steps but the first."""
    warnings.filterwarnings("ignore")
    from toolkit.plan.measure import measure
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    return statistics.median(measure(resolve(Recipe.model_validate(values)), LENGTH, steps=4, track=False).seconds[1:])


def predicted(values: dict[str, Any], speeds: Any) -> float:
    from toolkit.plan.calibrate import _applied, _replicated
    from toolkit.plan.hardware import Device
    from toolkit.plan.predict import Planner
    from toolkit.plan.time import Rates, step_seconds
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve, strategy_of

    asked = resolve(Recipe.model_validate(values))
    device, rates = _applied(speeds, _replicated(asked, 2), Device("cpu", 1, 0, 0, 0, 0, ""), Rates(), LENGTH)
    planner = Planner.of(asked, LENGTH)
    holdings = planner.skeleton.holdings
    compute = strategy_of(asked).ledger_class()(holdings, asked).compute_as
    segments = planner.segments(asked.recipe.activation_checkpointing, asked.micro_size, compute)
    found = step_seconds(asked, holdings, segments, device, rates)
    assert found is not None
    return found.total


def calibration(group: Any, values: dict[str, Any]) -> Any:
    from toolkit.plan.calibrate import Speeds, _replicated, _speeds
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    together = _replicated(resolve(Recipe.model_validate(values)), 2).recipe.model_dump(exclude_unset=True)
    return Speeds(*(max(column) for column in zip(*group.run(_speeds, together, "cpu", LENGTH), strict=True)))


def rounds(group: Any, number: int, lora: bool) -> dict[str, tuple[float, float]]:
    """Of every strategy the medians of predicted and measured seconds over ``number`` turns."""
    said: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    real: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(number):
        speeds = calibration(group, recipe("ddp", lora))
        print("   ", dataclasses.asdict(speeds), file=sys.stderr, flush=True)
        for name in STRATEGIES:
            real[name].append(max(group.run(measured, recipe(name, lora))))
            said[name].append(predicted(recipe(name, lora), speeds))
    return {name: (statistics.median(said[name]), statistics.median(real[name])) for name in STRATEGIES}


def main(number: int = 3) -> None:
    from toolkit.launch.group import WorkerGroup

    warnings.filterwarnings("ignore")
    with WorkerGroup(2) as group:
        for lora in (False, True):
            for name, (said, real) in rounds(group, number, lora).items():
                kind = "lora" if lora else "full"
                print(f"| {kind} | {name} | {said:.3f} | {real:.3f} | {said / real - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
