"""Cells of a bench: the measured recipes, their turns, and the results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.benchmark.job import Order, Turn, turn_job
from toolkit.errors import InputError
from toolkit.launch.group import WorkerGroup
from toolkit.launch.job import check_machine
from toolkit.machine import cpu_count
from toolkit.planning.hardware import devices
from toolkit.recipe.load import load_recipe, recipe_from, source_of
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import own_keys
from toolkit.rooms import all_options
from toolkit.strategies import resolve

TIME_LIMIT = 600.0
"""Time limit of a turn, in seconds."""


@dataclass
class Cell:
    """One recipe and its turns. ``label``: its name among the cells."""

    label: str
    resolved: Resolved
    asked: bool = False
    turns: list[list[Turn]] = field(default_factory=list)
    """Results by turn, then by rank."""
    counted: list[Turn] = field(default_factory=list)
    failure: str | None = None

    @property
    def seconds_by_turn(self) -> list[list[float]]:
        """Seconds of every timed step: those of the slowest rank."""
        return [[max(rank.seconds[at] for rank in turn) for at in range(len(turn[0].seconds))] for turn in self.turns]

    @property
    def seconds(self) -> list[float]:
        """Seconds of the steps of all turns."""
        return [seconds for turn in self.seconds_by_turn for seconds in turn]

    def sums(self, of: Callable[[Turn], Sequence[float]]) -> list[float]:
        """Something of every step, summed over ranks."""
        return [sum(of(rank)[at] for rank in turn) for turn in self.turns for at in range(len(turn[0].seconds))]

    @property
    def rates(self) -> list[float]:
        """Tokens of the rows per second of each turn, without padding; those that several ranks share count once."""
        return self._per_second(lambda rank: rank.row_tokens)

    @property
    def supervised_rates(self) -> list[float]:
        """Supervised tokens per second of each turn."""
        return self._per_second(lambda rank: rank.supervised)

    def _per_second(self, of: Callable[[Turn], Sequence[int]]) -> list[float]:
        found = []
        for turn, seconds in zip(self.turns, self.seconds_by_turn, strict=True):
            parts = [turn[rank] for rank in self.resolved.part_ranks]
            found.append(sum(sum(of(rank)[: len(rank.seconds)]) for rank in parts) / sum(seconds))
        return found


def make_cells(
    recipe: str | Path | Recipe,
    overrides: Sequence[str],
    strategies: Sequence[str],
    options: Sequence[str],
    against: str | Path | None,
) -> tuple[list[Cell], list[str]]:
    """The recipe, the recipe under each of ``strategies`` and with each of ``options`` (``key=value``, or several
    separated by commas), and the recipe ``against``; and the skipped ones, with their reason. Raises InputError."""
    source = source_of(recipe)
    asked = resolve(recipe_from(recipe, overrides), source)
    check_machine(asked)
    name = asked.recipe.strategy.name
    cells, left_out = [Cell(name, asked, asked=True)], []
    own = [f"strategy.{key}=null" for key in own_keys() if getattr(asked.recipe.strategy, key) is not None]
    wanted = [(other, [f"strategy.name={other}", *own]) for other in strategies if other != name]
    wanted += [(option, option.split(",")) for option in options]
    for label, more in wanted:
        try:
            resolved = resolve(recipe_from(recipe, [*overrides, *more]), source)
            check_machine(resolved)
        except InputError as error:
            left_out.append(f"{label}: {error}")
            continue
        cells.append(Cell(label, resolved))
    if against is not None:
        other = resolve(load_recipe(against), str(against))
        check_machine(other)
        cells.append(Cell(str(against), other))
        cells[0].label = source
    return cells, left_out


@dataclass(frozen=True)
class Plan:
    """The amount of work: ``turns`` of each cell, interleaved, with ``steps`` timed after ``warmup``."""

    turns: int = 3
    steps: int = 5
    warmup: int = 2
    full: bool = False
    memory: bool = True
    """On a CPU, an additional short, untimed turn each, which counts the bytes of all storages."""


def run_cells(
    cells: Sequence[Cell],
    plan: Plan,
    trace: str | None,
    say: Callable[[str], None],
    groups: dict[int, WorkerGroup] | None = None,
) -> None:
    """Run the turns of every cell; a cell that fails reports it, and the others continue."""
    kept = {} if groups is None else groups
    try:
        for turn in range(plan.turns):
            for cell in cells if turn % 2 == 0 else list(reversed(cells)):
                last = turn == plan.turns - 1
                order = _order(cell, plan, trace if last and cell.asked else None)
                found = _turn(cell, order, kept)
                if found is not None:
                    cell.turns.append(found)
                    say(f"  turn {turn + 1}/{plan.turns}  {cell.label}: {cell.rates[-1]:,.0f} tokens/s")
        if plan.memory:
            for cell in cells:
                # What counts storages on a CPU keeps torch from compiling: it would measure another run.
                if cell.resolved.device == "cpu" and not cell.resolved.recipe.compile:
                    short = Order(_values(cell), cell.resolved.source, "cpu", 1, 1, plan.full, counted=True)
                    cell.counted = _turn(cell, short, kept) or []
    finally:
        if groups is None:
            for group in kept.values():
                group.close()


def _values(cell: Cell) -> dict[str, Any]:
    return cell.resolved.recipe.model_dump(mode="json")


def _order(cell: Cell, plan: Plan, trace: str | None) -> Order:
    resolved = cell.resolved
    return Order(_values(cell), resolved.source, resolved.device, plan.steps, plan.warmup, plan.full, trace=trace)


def _turn(cell: Cell, order: Order, groups: dict[int, WorkerGroup]) -> list[Turn] | None:
    from toolkit.launch.group import JobFailed

    if cell.failure is not None:
        return None
    world = cell.resolved.world_size
    group = groups.setdefault(world, WorkerGroup(world, max(1, cpu_count() // world)))
    try:
        found = group.run(turn_job, order, timeout=TIME_LIMIT)
    except JobFailed as error:
        cell.failure = str(error).strip().splitlines()[-1]
        return None
    out = next((rank.out_of_memory for rank in found if rank.out_of_memory), None)
    if out is not None:
        cell.failure = f"out of memory: {out}"
        group.close()
        return None
    return found


def as_json(cell: Cell, rate: float | None) -> dict[str, Any]:
    """The contract's fields, and more."""
    recipe, resolved = cell.resolved.recipe, cell.resolved
    fields: dict[str, Any] = {
        "label": cell.label,
        "strategy": recipe.strategy.name,
        "offload": recipe.strategy.offload,
        "activation_checkpointing": recipe.activation_checkpointing,
        "micro_size": resolved.micro_size,
        "accumulation": resolved.accumulation,
        "processes": resolved.world_size,
        "packing": recipe.data.packing,
        "loss": resolved.loss_kernel,
        "compile": recipe.compile,
        **{name: value for option in all_options().values() for name, value in option.cell(recipe).items()},
        "recipe_sha256": resolved.sha256,
        "asked": cell.asked,
        "fits": cell.failure is None,
        "reason": cell.failure or "",
    }
    if not cell.turns:
        missing = ("tokens_per_second", "supervised_tokens_per_second", "peak_allocated_bytes", "peak_reserved_bytes")
        return fields | dict.fromkeys((*missing, "mfu", "seconds_per_step"))
    seconds, rates = cell.seconds, cell.rates
    ranks = [rank for turn in cell.turns for rank in turn]
    allocated = [rank.peak_allocated for rank in (cell.counted or cell.turns[-1])]
    reserved = [rank.peak_reserved for rank in cell.turns[-1]]
    rows = ranks[0].rows
    for rank in ranks[1:]:
        rows += rank.rows
    phases = {name: sum(rank.phases[name] for rank in ranks) for name in ranks[0].phases}
    spent = sum(phases.values()) or 1.0
    flops = [of_rank for rank in ranks for of_rank in rank.flops[: len(rank.seconds)]]
    mfu = None
    if rate is not None and None not in flops:
        mfu = sum(f for f in flops if f is not None) / (sum(seconds) * resolved.world_size * rate)
    return fields | {
        "tokens_per_second": statistics.median(rates),
        "supervised_tokens_per_second": statistics.median(cell.supervised_rates),
        "tokens_per_second_by_turn": rates,
        "seconds_per_step": statistics.median(seconds),
        "seconds_spread": [min(seconds), max(seconds)],
        "seconds_by_turn": cell.seconds_by_turn,
        "peak_allocated_bytes": max((a for a in allocated if a is not None), default=None),
        "peak_reserved_bytes": max((r for r in reserved if r is not None), default=None),
        "mfu": mfu,
        "padding": 1 - rows.tokens / max(1, rows.slots),
        "phases": {name: value / spent for name, value in phases.items()},
        "final_loss": cell.turns[-1][0].losses[-1] if cell.turns[-1][0].losses else None,
        "profile": next((rank.profile for rank in cell.turns[-1] if rank.profile), None),
    }


def rate_of(device: str, tflops: float | None) -> float | None:
    """The peak rate for MFU: given, or from the data sheet of this GPU."""
    if tflops is not None:
        return tflops * 1e12
    if device != "cuda":
        return None
    import torch

    return device_rate(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def device_rate(name: str) -> float | None:
    """Floating point operations per second of a GPU by its data sheet (dense, bf16; fp16 where it has no bf16), or
    None if it is not known."""
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("-", " ").split()
    joined = "".join(words)
    matches = [key for key in devices() if all(part in joined for part in key.split("-"))]
    if not matches:
        return None
    device = devices()[max(matches, key=len)]
    return (device.bf16 or device.rate("float16")) * 1e12
