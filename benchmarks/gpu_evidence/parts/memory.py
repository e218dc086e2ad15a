"""Measured memory by phase, compared with the prediction of `toolkit plan` for the same recipe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu_evidence.cells import Cell, Part, Record, Setting, Skipped
from benchmarks.gpu_evidence.machine import host_bytes_available
from benchmarks.gpu_evidence.shapes import DISTRIBUTED, LORA, Values, recipe, resolved_here
from benchmarks.gpu_evidence.train import train_here
from toolkit.planning.choice import Search
from toolkit.planning.hardware import GIB, Device
from toolkit.planning.time import Rates
from toolkit.recipe.resolve import Resolved

STEPS = 2
"""The second has every buffer and moment."""

_OFFLOAD = (("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer"), ("zero3", "all"), ("fsdp1", "all"),
            ("fsdp2", "all"))  # fmt: skip
_HOST_SHARE = 0.9
"""Of the host's free memory: a process that the system ends leaves no figure."""


def cells(setting: Setting) -> list[Cell]:
    plain = [(kind, length) for length in (512, 2048, 8192) for kind in ("none", "selective", "full")]
    return [
        *(_cell("1b", way, "single", kind, length) for kind, length in plain for way in ("lora", "full")),
        *(_cell("1b", way, strategy, "full", 2048, micro=2) for strategy in DISTRIBUTED for way in ("lora", "full")),
        *(_cell("1b", "full", strategy, "full", 2048, offload=offload) for strategy, offload in _OFFLOAD),
        _cell("1b", "full", "single", "full", 2048, precision="fp32"),
        _cell("1b", "full", "single", "full", 2048, precision="fp16"),
        _cell("1b", "full", "single", "full", 2048, precision="bf16-pure"),
        *(_cell("8b", "lora", "single", kind, length) for kind, length in (*((k, 2048) for k in _KINDS),
          ("none", 512), ("full", 512), ("full", 8192))),
        *(_cell("8b", "lora", strategy, "full", 2048) for strategy in ("zero2", "zero3", "fsdp1", "fsdp2")),
        _cell("8b", "lora", "zero3", "full", 2048, offload="all"),
        *(_cell("8b", "full", strategy, "full", 2048, precision="bf16-pure") for strategy in ("single", "fsdp2")),
        # 120 GiB of weights, gradients and moments: larger than most devices, and the plan has to say so.
        _cell("8b", "full", "single", "full", 512),
    ]  # fmt: skip


_KINDS = ("none", "selective", "full")


def _cell(
    model: str, way: str, strategy: str, kind: str, length: int, *,
    micro: int = 1, offload: str = "none", precision: str = "bf16",
) -> Cell:  # fmt: skip
    name = f"{model}-{way}-{strategy}" + (f"-offload-{offload}" if offload != "none" else "")
    name += f"-{precision}-{kind}-{micro}x{length}"
    sections: Values = {
        "adapter": LORA if way == "lora" else None,
        "precision": precision,
        "activation_checkpointing": kind,
        "data": {"max_length": length},
        "batch": {"micro_size": micro, "accumulation": 2},
        "strategy": {"name": strategy, "offload": offload},
    }
    return Cell(name, partial(_measure, model, strategy, sections), usual=70 if model == "8b" else 25, limit=200)


def _measure(model: str, strategy: str, sections: Values, setting: Setting) -> dict[str, Any]:
    resolved = resolved_here(setting, recipe(setting, model, strategy, **sections))
    predicted, weights = _predicted(setting, resolved)
    _check_host(resolved, weights, predicted["host_bytes"])
    measured = train_here(setting, resolved, STEPS, by_phase=True)
    return {
        "recipe_sha256": resolved.sha256,
        "weights": weights,
        "predicted": predicted,
        "measured": measured,
        "predicted_over_measured": _ratio(predicted, measured),
        "fits_as_predicted": predicted["fits"] == (measured["out_of_memory"] is None),
    }


def _predicted(setting: Setting, resolved: Resolved) -> tuple[dict[str, Any], int]:
    """`toolkit plan`'s own candidate for the recipe, with no headroom kept free; and the weights of the model."""
    memory = setting.device.memory_bytes or host_bytes_available()
    device = Device(setting.device.name, memory / GIB, 0, 0, 0, 0, "this machine")
    search = Search(resolved, device, 0.0, Rates())
    return search.candidate(resolved, asked=True).as_json(), search.planner.skeleton.holdings.elements()


def _ratio(predicted: dict[str, Any], measured: dict[str, Any]) -> float | None:
    """Of the peaks of the allocator: the plan's reserve stands for the CUDA context, which is not in them."""
    if measured["out_of_memory"] is not None:
        return None
    steps = [size for phase, size in measured["allocated_by_phase"].items() if phase != "load"]
    return (predicted["peak_bytes"] - predicted["breakdown"]["reserve"]) / max(steps)


def _check_host(resolved: Resolved, weights: int, offloaded: int) -> None:
    """Weights are drawn in float32 and cast; a 16-bit engine keeps the float32 ones until its masters are set."""
    copies = 6 if resolved.recipe.adapter is not None else 8
    needed, free = copies * weights + offloaded, host_bytes_available()
    if needed > _HOST_SHARE * free:
        raise Skipped(f"needs {needed / GIB:.0f} GiB of host memory, {free / GIB:.0f} are free")


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    results = {record["cell"]: record["result"] for record in records if "result" in record}
    ratios = {cell: r["predicted_over_measured"] for cell, r in results.items() if r.get("predicted_over_measured")}
    return {
        "measured_cells": len(ratios),
        "predicted_over_measured": dict(sorted(ratios.items(), key=lambda item: abs(item[1] - 1), reverse=True)),
        "fit_predicted_wrong": [cell for cell, r in results.items() if not r.get("fits_as_predicted", True)],
    }


PART = Part("memory", "peak memory by phase, and the plan's prediction", cells, summarise)
