"""The kill matrix: every fault under every strategy it applies to, and what caught it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, RunFailed
from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.recipe.strategy_names import own_keys
from toolkit.results import versions
from toolkit.strategies import resolve
from toolkit.strategies import strategies as known_strategies
from toolkit.verification.faults import fault_class, faults
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import merge, verify


@dataclass(frozen=True)
class Cell:
    """One fault under one strategy. ``caught``: the stage that found it; ``right``: one that the fault expects.
    ``killed``: found there; a run that ended for another reason has found nothing. ``diagnosis``: its id; ``named``:
    one that the fault expects."""

    fault: str
    strategy: str
    killed: bool
    right: bool
    named: bool
    caught: str
    where: str
    diagnosis: str
    cause: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def kill_matrix(
    resolved: Resolved,
    only: Sequence[str] | None,
    time_limit: float,
    say: Callable[[str], None],
    strategies: Sequence[str] | None = None,
    groups: dict[int, WorkerGroup] | None = None,
) -> list[Cell]:
    """Run every fault (or ``only`` those) against every strategy it applies to; process groups are kept for all."""
    own = groups is None
    kept = groups if groups is not None else {}
    cells = []
    try:
        for fault in only or faults():
            for strategy in fault_class(fault).strategies.names():
                if strategies is not None and strategy not in strategies:
                    continue
                cell = _cell(resolved, fault, strategy, kept, time_limit)
                cells.append(cell)
                mark = "killed" if cell.killed else "MISSED"
                cause = (cell.diagnosis or "-") + ("" if cell.named or not cell.killed else " (another was expected)")
                expected = f"\n    {cell.where or 'no difference'}; expected: {' or '.join(fault_class(fault).stages)}"
                line = f"{fault:<22} {strategy:<7} {mark}  {cell.caught:<18} {cause:<32} {cell.seconds:.1f} s"
                say(line if cell.killed else line + expected)
    finally:
        if own:
            for group in kept.values():
                group.close()
    return cells


def _cell(resolved: Resolved, fault: str, strategy: str, groups: dict[int, WorkerGroup], time_limit: float) -> Cell:
    started = time.perf_counter()
    distributed = known_strategies()[strategy].traits.distributed
    world = max(fault_class(fault).processes, resolved.world_size) if distributed else 1
    group = groups.setdefault(world, WorkerGroup(world))
    fresh = groups.setdefault(-world, WorkerGroup(world))
    try:
        outcome = verify(
            with_strategy(resolved, strategy, world),
            group=group,
            fresh=fresh,
            fault=fault,
            time_limit=time_limit,
            stop_early=True,
        )
    except (InputError, RunFailed) as error:
        seconds = time.perf_counter() - started
        return Cell(fault, strategy, False, False, False, "not run", str(error).splitlines()[0], "", "", seconds)
    caught, where = what_caught(outcome)
    expected = fault_class(fault).stages
    right = caught in expected or ("engagement" in expected and bool(outcome.unproven))
    diagnosis, cause = (outcome.diagnosis.id, outcome.diagnosis.cause) if outcome.diagnosis else ("", "")
    named = diagnosis in fault_class(fault).diagnoses
    killed = right and outcome.exit_code != 0
    seconds = time.perf_counter() - started
    return Cell(fault, strategy, killed, right, named, caught, where, diagnosis, cause, seconds)


def with_strategy(resolved: Resolved, strategy: str, world: int) -> Resolved:
    """The recipe under another strategy."""
    values = resolved.recipe.model_dump(mode="json")
    own = {} if strategy == resolved.recipe.strategy.name else dict.fromkeys(own_keys())
    merge(values, {"strategy": {"name": strategy, "offload": "none", **own},
                   "machine": {"processes": world, "nodes": 1},
                   "batch": {"global_size": None, "micro_size": resolved.micro_size,
                             "accumulation": resolved.accumulation}})  # fmt: skip
    return resolve(Recipe.model_validate(values), resolved.source, device=resolved.device)


def what_caught(outcome: Outcome) -> tuple[str, str]:
    """The stage that names the first difference, else ``engagement`` where evidence is missing; and where."""
    if outcome.verdict == "different" and outcome.difference:
        _, stage, measure = outcome.difference
        return stage.name, f"step {measure.step + 1}: {measure.tensor}"
    if outcome.failure:
        return "failure", outcome.failure
    if outcome.unproven:
        return "engagement", f"{outcome.unproven[0].claim}: {outcome.unproven[0].seen}"
    return "nothing", ""


def write_matrix(cells: Sequence[Cell], target: Path) -> None:
    """The table, in Markdown."""
    killed, right = sum(cell.killed for cell in cells), sum(cell.named for cell in cells)
    packages = " · ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        "# Kill matrix",
        "",
        "Written by `toolkit verify RECIPE --kill-matrix -o FILE`: every known fault injected, where it really",
        "happens, into a run that is otherwise right, under every strategy it applies to. Comparisons and diagnoses do",
        "not know which one is running.",
        "",
        f"{killed} of {len(cells)} killed, {right} with the right diagnosis. {packages}",
        "",
        "| fault | what | seen in | strategies: stage that caught it | diagnosis |",
        "| --- | --- | --- | --- | --- |",
    ]
    for fault in dict.fromkeys(cell.fault for cell in cells):
        kind = fault_class(fault)
        mine = [cell for cell in cells if cell.fault == fault]
        by_stage: dict[str, list[str]] = {}
        for cell in mine:
            by_stage.setdefault(cell.caught if cell.killed else "**missed**", []).append(cell.strategy)
        stages = "; ".join(f"{', '.join(names)}: {stage}" for stage, names in by_stage.items())
        causes = (
            "; ".join(dict.fromkeys(f"{cell.diagnosis}: {cell.cause}" for cell in mine if cell.diagnosis)) or "none"
        )
        lines.append(f"| {fault} | {kind.title} | {kind.reference or 'none'} | {stages} | {causes} |")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
