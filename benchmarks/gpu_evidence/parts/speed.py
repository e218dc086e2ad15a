"""Tokens per second of the training loop, and where a step's time went. `toolkit bench` comes in when it exists."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Setting, Skipped
from benchmarks.gpu_evidence.shapes import LORA, Values, recipe, resolved_here
from benchmarks.gpu_evidence.train import WARM, train_here

STEPS = WARM + 5


def cells(setting: Setting) -> list[Cell]:
    return [
        Cell("bench", _bench),
        *(_cell("1b", way, "single", kind, 4) for way in ("lora", "full") for kind in ("none", "full")),
        *(_cell("1b", "full", strategy, "full", 4) for strategy in ("ddp", "zero2", "zero3", "fsdp2")),
        _cell("1b", "full", "single", "selective", 4),
        _cell("8b", "lora", "single", "full", 2),
        _cell("8b", "lora", "fsdp2", "full", 2),
    ]


def _bench(setting: Setting) -> dict[str, Any]:
    """Shapes, fused loss, compile and the peers that are installed are its cells."""
    if importlib.util.find_spec("toolkit.bench") is None:
        raise Skipped("`toolkit bench` does not exist yet: no fused loss, no compile, no peers are measured")
    raise Skipped("`toolkit bench` exists; this part does not call it yet")


def _cell(model: str, way: str, strategy: str, kind: str, micro: int) -> Cell:
    name = f"loop-{model}-{way}-{strategy}-{kind}-{micro}x2048"
    sections: Values = {
        "adapter": LORA if way == "lora" else None,
        "activation_checkpointing": kind,
        "data": {"max_length": 2048},
        "batch": {"micro_size": micro, "accumulation": 2},
        "strategy": {"name": strategy},
    }
    return Cell(name, partial(_measure, model, strategy, sections), usual=80 if model == "8b" else 35)


def _measure(model: str, strategy: str, sections: Values, setting: Setting) -> dict[str, Any]:
    resolved = resolved_here(setting, recipe(setting, model, strategy, **sections))
    return {"recipe_sha256": resolved.sha256} | train_here(setting, resolved, STEPS, profile=True)


PART = Part("speed", "tokens per second of the training loop, and the kernels of a step", cells)
