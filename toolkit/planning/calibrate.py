"""Runs steps of the recipe's model and collectives on this machine, to replace assumed rates by measured ones."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import JobFailed, WorkerGroup
from toolkit.machine import cpu_count, cuda_device_count
from toolkit.planning.candidate import gib
from toolkit.planning.hardware import GIB, Device
from toolkit.planning.mechanics import TOKENS, Step, own_seconds, seconds, step_of, variants
from toolkit.planning.predict import Planner
from toolkit.planning.time import Rates, flops, update_passes
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, simplest
from toolkit.strategies.memory.base import BYTES

_PATIENCE = 1800.0
"""Seconds for the steps of one strategy, the making of the model included."""
_LARGE, _SMALL = 4 * 2**20, 256
"""Elements of the collectives that are timed, float32: for the rate, and for what each costs whatever its size."""


@dataclasses.dataclass(frozen=True)
class Speeds:
    """``rows``: a step of whole rows with nothing sent. With several processes also the seconds of an all-reduce of
    ``_LARGE`` and of ``_SMALL`` elements, and steps of a few tokens: ``alone`` with nothing sent, and by strategy.
    All of the slowest rank."""

    rows: Step
    large: float | None = None
    small: float | None = None
    alone: Step | None = None
    under: dict[str, Step] = dataclasses.field(default_factory=dict)


def calibrated(asked: Resolved, device: Device, rates: Rates, log: Path) -> tuple[Device, Rates]:
    """The device and the rates as this machine reaches them, all processes of a node computing at once.

    Raises InputError if this machine is not of the kind that is planned for, or the model does not fit whole in a
    process; RunFailed if a rank fails. Runs the model, with its weights; ``log``: what the ranks write.
    """
    processes = asked.recipe.machine.processes
    if asked.device == "cuda":
        if not cuda_device_count():
            raise InputError(
                "--calibrate: runs the model on this machine, which has no GPU; omit it to plan with assumed rates"
            )
        processes = min(processes, cuda_device_count())
    together = replicated(asked, processes)
    need = Planner.of(together, asked.recipe.data.max_length).memory(together).peak
    if need > device.memory * GIB:
        raise InputError(
            f"--calibrate: needs the whole model in each process, {gib(need)} of {device.memory:g} GiB; "
            "calibrate with an adapter, a smaller micro_size or a config with fewer layers, or omit it"
        )
    try:
        # As many threads as training has, see bench; what the packages write goes beside the plan, not through it.
        with WorkerGroup(processes, max(1, cpu_count() // processes), log=log.absolute()) as group:
            found = timed(group, asked, together)
    except JobFailed as error:
        last = str(error).strip().rsplit("\n", 1)[-1]
        raise RunFailed(f"--calibrate: rank {error.rank} ended: {last}; its output: {log}") from None
    return applied(found, asked, together, device, rates)


def timed(group: WorkerGroup, asked: Resolved, together: Resolved) -> Speeds:
    """``together`` through the processes of ``group``, and with several each strategy that takes it."""

    def slowest(recipe: Recipe, *more: Any) -> Step:
        values = recipe.model_dump(exclude_unset=True)
        return max(group.run(step_of, values, asked.device, *more, timeout=_PATIENCE), key=lambda step: step.whole)

    rows = slowest(together.recipe, asked.recipe.data.max_length, False)
    if together.world_size == 1:
        return Speeds(rows)
    large, small = (max(column) for column in zip(*group.run(_reductions, asked.device), strict=True))
    recipes = variants(together, asked)
    alone = slowest(recipes[_replicating(together.world_size)], TOKENS, False)
    return Speeds(rows, large, small, alone, {name: slowest(recipe) for name, recipe in recipes.items()})


def applied(speeds: Speeds, asked: Resolved, together: Resolved, device: Device, rates: Rates) -> tuple[Device, Rates]:
    """The device and the rates under which what was timed is what is predicted."""
    planner = Planner.of(together, asked.recipe.data.max_length)
    segments = planner.segments(together.recipe.activation_checkpointing, together.micro_size, "autocast")
    holdings = planner.holdings
    reached = sum(flops(segments, list(holdings.order))) / ((speeds.rows.first + speeds.rows.last) / 2)
    reached *= 1.0 if together.precision.compute != "float32" else 2.0  # in terms of the 16-bit rate: see time.py
    moved = update_passes(together) * holdings.elements(True) * BYTES[together.precision.trainable] / speeds.rows.update
    known = dataclasses.replace(
        device,
        bf16=device.bf16 or reached / 1e12, bandwidth=device.bandwidth or moved / 1e9,
        link=device.link or 1.0, pcie=device.pcie or 1e6,
    )  # fmt: skip
    rates = dataclasses.replace(
        rates, compute=reached / (known.bf16 * 1e12), bandwidth=moved / (known.bandwidth * 1e9),
        by_kernel=False, handled=0.0, launch=0.0, spread=(1.0, 1.0), overlap=together.device == "cuda",
    )  # fmt: skip
    if speeds.large is None or speeds.small is None or speeds.alone is None:
        return known, rates
    world = together.world_size
    sent = 2 * (world - 1) / world * 4 * (_LARGE - _SMALL)
    wire = sent / max(speeds.large - speeds.small, 1e-9)
    rates = dataclasses.replace(rates, link=wire / (known.link * 1e9), latency=speeds.small / math.log2(max(2, world)))
    recipes = variants(together, asked)
    own = {}
    for name, step in speeds.under.items():
        resolved = resolve(recipes[name], together.source, device=together.device)
        own[name] = own_seconds(resolved, holdings, step, speeds.alone, known, rates)
    return known, dataclasses.replace(rates, own=own)


def replicated(asked: Resolved, processes: int) -> Resolved:
    """The recipe with whole weights in every process: they compute at once, and need not wait for one another."""
    values = asked.recipe.model_dump(exclude_unset=True)
    values["strategy"] = {"name": _replicating(processes)}
    values["machine"] = {"device": asked.device, "processes": processes, "nodes": 1}
    values["batch"] = {"micro_size": asked.micro_size, "accumulation": 2}
    return resolve(Recipe.model_validate(values), asked.source, device=asked.device)


def _replicating(processes: int) -> str:
    """The simplest strategy for this number of processes without sharding."""
    return simplest(lambda strategy: strategy.traits.distributed == (processes > 1) and not strategy.traits.shards)


def _reductions(device: str) -> tuple[float, float]:
    """Seconds of an all-reduce of ``_LARGE`` and of ``_SMALL`` elements; every rank calls it."""
    from toolkit.strategies.engines.process_group import take_device

    where = take_device(device)
    return _reduction(_LARGE, where, device), _reduction(_SMALL, where, device)


def _reduction(elements: int, where: Any, device: str) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(elements, device=where)
    return statistics.median([seconds(lambda: dist.all_reduce(tensor), device) for _ in range(7)][1:])
