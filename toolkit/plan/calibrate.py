"""Real steps of the recipe's model and real collectives on this machine, to replace assumed rates by reached ones."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
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
from toolkit.strategies.ledgers.base import BYTES

_STEPS = 4
_LARGE, _SMALL = 4 * 2**20, 256
"""Elements of the collectives that are timed, float32: for the rate, and for what each costs whatever its size."""


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Seconds, medians of the slowest rank: of a micro-batch's forward and backward, of an update with its clipping,
    and of an all-reduce of ``_LARGE`` and of ``_SMALL`` elements (None with one process)."""

    micro: float
    update: float
    large: float | None
    small: float | None


def calibrated(asked: Resolved, device: Device, rates: Rates) -> tuple[Device, Rates]:
    """The device and the rates as this machine reaches them, all processes of a node computing at once.

    Raises InputError where this machine is not of the kind that is planned for; runs the model, with its weights.
    """
    processes = asked.recipe.machine.processes
    if asked.device == "cuda":
        if not cuda_device_count():
            raise InputError(
                "--calibrate: runs the model here, and this machine has no GPU; leave it out to plan on paper"
            )
        processes = min(processes, cuda_device_count())
    together = _replicated(asked, processes)
    length = asked.recipe.data.max_length
    with WorkerGroup(processes) as group:
        found = group.run(_speeds, together.recipe.model_dump(exclude_unset=True), asked.device, length,
                          timeout=1800.0)  # fmt: skip
    micro, update, large, small = zip(*found, strict=True)
    alone = processes == 1
    slowest = Speeds(max(micro), max(update), None if alone else max(large), None if alone else max(small))
    return _applied(slowest, together, device, rates, length)


def _applied(
    speeds: Speeds, together: Resolved, device: Device, rates: Rates, length: int
) -> tuple[Device, Rates]:  # fmt: skip
    planner = Planner.of(together, length)
    segments = planner.segments(together.recipe.activation_checkpointing, together.micro_size, "autocast")
    holdings = planner.skeleton.holdings
    reached = sum(flops(segments, list(holdings.order))) / speeds.micro
    reached *= 1.0 if together.precision.compute != "float32" else 2.0  # in terms of the 16-bit rate: see time.py
    moved = 7 * holdings.elements(True) * BYTES[together.precision.trainable] / speeds.update
    known = dataclasses.replace(
        device,
        bf16=device.bf16 or reached / 1e12, bandwidth=device.bandwidth or moved / 1e9,
        link=device.link or 1.0, pcie=device.pcie or 1e6,
    )  # fmt: skip
    rates = dataclasses.replace(
        rates, compute=reached / (known.bf16 * 1e12), bandwidth=moved / (known.bandwidth * 1e9),
        overlap=together.device == "cuda",
    )  # fmt: skip
    if speeds.large is None or speeds.small is None:
        return known, rates
    world = together.world_size
    sent = 2 * (world - 1) / world * 4 * (_LARGE - _SMALL)
    wire = sent / max(speeds.large - speeds.small, 1e-9)
    return known, dataclasses.replace(
        rates, link=wire / (known.link * 1e9), latency=speeds.small / math.log2(max(2, world))
    )


def _replicated(asked: Resolved, processes: int) -> Resolved:
    """The recipe with whole weights in every process: they compute at once, and need not wait for one another."""
    values = asked.recipe.model_dump(exclude_unset=True)
    values["strategy"] = {"name": "single" if processes == 1 else "ddp"}
    values["machine"] = {"device": asked.device, "processes": processes, "nodes": 1}
    values["batch"] = {"micro_size": asked.micro_size, "accumulation": 2}
    return resolve(Recipe.model_validate(values), asked.source, device=asked.device)


def _speeds(recipe: dict[str, Any], device: str, length: int) -> tuple[float, float, float | None, float | None]:
    from toolkit.plan.measure import random_batch
    from toolkit.strategies import strategy_of
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training.loss import loss_sum
    from toolkit.training.session import prepare_model

    resolved = resolve(Recipe.model_validate(recipe), device=device)
    accelerator = make_accelerator(resolved)
    engine = strategy_of(resolved).engine_class()(prepare_model(resolved, pad_token_id=0), accelerator)
    tensors = random_batch(engine.config, resolved, length, engine.device)

    def micro_batch() -> None:
        with engine.accumulating(False):  # nothing is sent
            with engine.autocast():
                loss = loss_sum(engine.model, engine.config, tensors, resolved.recipe.model.task)
            engine.backward(loss / (resolved.micro_size * length), False)

    micros, updates = [], []
    for _ in range(_STEPS):
        micros.append(_seconds(micro_batch, device))
        updates.append(_seconds(lambda: engine.step(0.0), device))
    # The first makes moments and buffers.
    micro, update = statistics.median(micros[1:]), statistics.median(updates[1:])
    if resolved.world_size == 1:
        return micro, update, None, None
    return micro, update, _reduction(_LARGE, engine.device, device), _reduction(_SMALL, engine.device, device)


def _reduction(elements: int, where: Any, device: str) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(elements, device=where)
    return statistics.median([_seconds(lambda: dist.all_reduce(tensor), device) for _ in range(7)][1:])


def _seconds(work: Callable[[], Any], device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
