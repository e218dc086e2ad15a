"""A measured row for every preset: memory and speed of its recipe in one process, deviation of its twin."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Setting
from benchmarks.gpu_evidence.shapes import preset, resolved_here
from benchmarks.gpu_evidence.train import WARM, train_here
from toolkit.recipe.resolve import Resolved
from toolkit.verification.passes import Pass
from toolkit.verification.run import verify

FOLDER = Path("ds_configs")
STEPS = WARM + 3
_MODEL = "Llama-3.2-1B shape"


def cells(setting: Setting) -> list[Cell]:
    names = sorted(file.parent.name for file in FOLDER.glob("*/recipe.yaml"))
    return [Cell(name, partial(_measure, name), usual=45) for name in names]


def _measure(name: str, setting: Setting) -> dict[str, Any]:
    resolved = resolved_here(setting, preset(setting, FOLDER / name))
    measured = train_here(setting, resolved, STEPS)
    twin = _deviation(resolved, setting)
    return {
        "ok": twin["verdict"] == "equivalent" and measured["out_of_memory"] is None,
        "model": "tiny" if setting.tiny else _MODEL,
        "rows": f"{resolved.micro_size} x {resolved.recipe.data.max_length} tokens, {resolved.accumulation} a step",
        **measured,
        "twin": twin,
    }


def _deviation(resolved: Resolved, setting: Setting) -> dict[str, Any]:
    """`toolkit verify`: the largest deviation of any loss and of any tensor's gradient, with what may differ."""
    outcome = verify(resolved, group=setting.workers.one, time_limit=min(100.0, setting.seconds))
    return {
        "verdict": outcome.verdict,
        "failure": outcome.failure,
        "deviation": {one.name: _worst(one) for one in outcome.passes},
        "first_difference": outcome.fields()["first_difference"],
    }


def _worst(one: Pass) -> dict[str, Any]:
    found = {}
    for stage in one.stages:
        measures = [measure for measure in stage.measures if measure.noise > 0]
        if stage.name in ("forward", "gradient") and measures:
            worst = max(measures, key=lambda measure: measure.error)
            found[stage.name] = worst.to_json()
    return found


PART = Part("presets", "memory, speed and deviation of every preset in one process", cells)
