"""Predicted and measured seconds per step on this machine; ``PYTHONPATH=tests python -m plan.times`` prints them.

A machine with other work on it is never twice as fast: calibration and measurement take turns, and medians are printed.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from plan.cells import LLAMA, LORA

MODEL = LLAMA | {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8000}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")


@dataclass(frozen=True)
class Way:
    """``length``, ``micro``, ``accumulation``, ``checkpointing`` of a recipe: what calibration does not vary."""

    length: int = 128
    micro: int = 2
    accumulation: int = 2
    checkpointing: str = "none"
    lora: bool = False

    @property
    def label(self) -> str:
        kind = "lora" if self.lora else "full"
        return f"{kind} {self.micro}x{self.length}x{self.accumulation} checkpointing {self.checkpointing}"


WAYS = (Way(), Way(lora=True), Way(192, 1, 4, "full"), Way(192, 1, 4, "full", lora=True))


def recipe(strategy: str, way: Way) -> dict[str, Any]:
    return {
        "model": {"config": MODEL},
        "tokenizer": {"path": "none"},
        "data": {"train": "none", "max_length": way.length},
        "batch": {"micro_size": way.micro, "accumulation": way.accumulation},
        "adapter": LORA if way.lora else None,
        "precision": "fp32",
        "activation_checkpointing": way.checkpointing,
        "strategy": {"name": strategy},
        "machine": {"device": "cpu", "processes": 2},
        "run": {"max_steps": 2, "save_every": 0, "eval_every": 0},
    }


def measured(values: dict[str, Any]) -> float:
    """Runs on a rank: the median second of all steps but the first, which makes moments and buffers."""
    warnings.filterwarnings("ignore")
    from toolkit.planning.measure import measure
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    resolved = resolve(Recipe.model_validate(values))
    return statistics.median(measure(resolved, resolved.recipe.data.max_length, steps=6, track=False).seconds[1:])


def predicted(values: dict[str, Any], speeds: Any) -> float:
    from toolkit.planning.calibrate import applied, replicated
    from toolkit.planning.hardware import Device
    from toolkit.planning.predict import Planner
    from toolkit.planning.time import Rates, step_seconds
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    asked = resolve(Recipe.model_validate(values))
    device, rates = applied(speeds, asked, replicated(asked, 2), Device("cpu", 1, 0, 0, 0, 0, ""), Rates())
    planner = Planner.of(asked, asked.recipe.data.max_length)
    found = step_seconds(asked, planner.skeleton.holdings, planner.segments_of(asked), device, rates)
    assert found is not None
    return found.total


def calibration(group: Any, values: dict[str, Any]) -> Any:
    from toolkit.planning.calibrate import replicated, timed
    from toolkit.recipe.schema import Recipe
    from toolkit.strategies import resolve

    asked = resolve(Recipe.model_validate(values))
    return timed(group, asked, replicated(asked, 2))


def rounds(group: Any, number: int, way: Way) -> dict[str, tuple[float, float]]:
    """Of every strategy the medians of predicted and measured seconds over ``number`` turns."""
    said: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    real: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(number):
        speeds = calibration(group, recipe("ddp", way))
        print("   ", dataclasses.asdict(speeds), file=sys.stderr, flush=True)
        for name in STRATEGIES:
            real[name].append(max(group.run(measured, recipe(name, way))))
            said[name].append(predicted(recipe(name, way), speeds))
    return {name: (statistics.median(said[name]), statistics.median(real[name])) for name in STRATEGIES}


def main(number: int = 3) -> None:
    from toolkit.launch.group import WorkerGroup

    warnings.filterwarnings("ignore")
    with WorkerGroup(2) as group:
        for way in WAYS:
            for name, (said, real) in rounds(group, number, way).items():
                print(f"| {way.label} | {name} | {said:.3f} | {real:.3f} | {said / real - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
