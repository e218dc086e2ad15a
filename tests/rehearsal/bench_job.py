"""A cell of `toolkit bench` with a budget of memory."""

from __future__ import annotations

from rehearsal import device
from rehearsal.cells import Cell
from rehearsal.rehearse import Outcome, as_rank, watching
from toolkit.benchmark.job import Order, turn_job


def limited(cell: Cell, share: float, root: str) -> list[tuple[int, float]]:
    """Device and share of every limit that a turn sets."""
    device.memory_fractions.clear()
    order = Order(cell.recipe(root), "recipe.yaml", "cuda", 1, 0, full=True, limit=int(share * device.MEMORY))
    with as_rank(cell.rank, cell.world, alone=True), watching(Outcome()):
        turn_job(order)
    return list(device.memory_fractions)
