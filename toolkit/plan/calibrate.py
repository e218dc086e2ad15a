"""Two real steps of the recipe's model on this machine, to replace assumed rates by reached ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.machine import cuda_device_count
from toolkit.plan.hardware import Device
from toolkit.plan.predict import Planner
from toolkit.plan.time import Rates, flops
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve


def calibrated(asked: Resolved, device: Device, rates: Rates) -> tuple[Device, Rates]:
    """The device and the rates with the arithmetic's share as two steps of one process reach it here (the second
    counts: the first makes moments and buffers). The optimizer's own time is in the share.

    Raises InputError where this machine is not of the kind that is planned for; runs the model, with its weights.
    """
    if asked.device == "cuda" and not cuda_device_count():
        raise InputError("--calibrate: runs the model here, and this machine has no GPU; leave it out to plan on paper")
    alone = _alone(asked)
    length = asked.recipe.data.max_length
    with WorkerGroup(1) as group:
        seconds: float = group.run(_second_step, alone.recipe.model_dump(exclude_unset=True), asked.device, length,
                                   timeout=1800.0)[0]  # fmt: skip
    planner = Planner.of(alone, length)
    segments = planner.segments(alone.recipe.activation_checkpointing, alone.micro_size, "autocast")
    reached = sum(flops(segments, list(planner.skeleton.holdings.order))) * alone.accumulation / seconds
    peak = device.bf16 * 1e12 * (0.5 if asked.precision.compute == "float32" else 1.0)
    if peak:
        return device, dataclasses.replace(rates, compute=reached / peak)
    # No data sheet: what was reached is the rate, and the optimizer's share is already in it.
    factor = 2.0 if asked.precision.compute == "float32" else 1.0
    known = dataclasses.replace(device, bf16=factor * reached / 1e12, bandwidth=1e6, link=2.0, pcie=1e6)
    return known, dataclasses.replace(rates, compute=1.0)


def _alone(asked: Resolved) -> Resolved:
    values = asked.recipe.model_dump(exclude_unset=True)
    values["strategy"] = {"name": "single"}
    values["machine"] = {"device": asked.device, "processes": 1, "nodes": 1}
    values["batch"] = {"micro_size": asked.micro_size, "accumulation": 1}
    return resolve(Recipe.model_validate(values), asked.source, device=asked.device)


def _second_step(recipe: dict[str, Any], device: str, length: int) -> float:
    import torch

    from toolkit.plan.measure import measure

    resolved = resolve(Recipe.model_validate(recipe), device=device)
    found = measure(resolved, length, steps=2, track=False)
    if device == "cuda":
        torch.cuda.empty_cache()
    return found.seconds[-1]
