"""Orders of jobs in which everything follows everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rehearsal.cells import Cell
from rehearsal.rehearse import Outcome, in_turn

RANK = 7
"""Of every job here."""


def every_pair(names: Sequence[str]) -> list[str]:
    """A sequence in which each name follows each once, itself too: a round trip over every edge (Hierholzer)."""
    left = {name: list(names) for name in names}
    path, trip = [names[0]], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            trip.append(path.pop())
    return trip[::-1]


def what_it_is(outcome: Outcome) -> dict[str, Any]:
    """What must be the same whatever ran before in the process."""
    step = outcome.counts.get("step")
    return {
        "error": outcome.error and outcome.error.strip().splitlines()[-1],
        "refused": outcome.refused,
        "accelerate": outcome.accelerate,
        "claims": outcome.claims,
        "parameters": outcome.local,
        "collectives of two steps": dict(step.collectives) if step else {},
        "reports": sorted({str(report) for report in outcome.reports if report.kind == "cpu-in-nccl"}),
    }


def differences(cells: list[Cell], root: str) -> list[tuple[str, str, str]]:
    """Of jobs in turn in one process: which comes after which and is not as it is alone, and how."""
    alone = {}
    for cell in dict.fromkeys(cells):
        [outcome] = in_turn([cell], root)
        alone[cell] = what_it_is(outcome)
    found = []
    before: list[Cell | None] = [None, *cells]
    for earlier, cell, outcome in zip(before, cells, in_turn(cells, root), strict=False):
        now = what_it_is(outcome)
        wrong = [f"{key}: {now[key]}, alone {alone[cell][key]}" for key in now if now[key] != alone[cell][key]]
        wrong = wrong[:1] if now["error"] else wrong
        if wrong or now["error"]:
            found.append((earlier.name if earlier else "-", cell.name, "; ".join(wrong)[:600] or str(now["error"])))
    return found


def of_strategies(names: Sequence[str], root: str) -> list[tuple[str, str, str]]:
    """Each strategy after each."""
    return differences([Cell(name, rank=RANK) for name in every_pair(names)], root)


def of_precisions(names: Sequence[str], precisions: Sequence[str], root: str) -> list[tuple[str, str, str]]:
    """Each strategy in one precision after another."""
    cells = [Cell(name, precision=precision, rank=RANK) for name in names for precision in precisions]
    return differences(cells, root)


def then_offload(names: Sequence[str], root: str) -> list[tuple[str, str, str]]:
    """Each strategy, then fsdp2 with everything on the host: its gradients are summed there."""
    offload = Cell("fsdp2", "offload-all", rank=RANK, sections={"strategy": {"offload": "all"}})
    found = []
    for name in names:
        found += differences([replace(offload, strategy=name, option="plain", sections={}), offload], root)
    return found
