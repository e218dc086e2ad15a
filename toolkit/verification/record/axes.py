"""Along which axis of the mesh a collective runs, by the ranks of its group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.recipe.mesh import Mesh

EXCHANGE = "all-to-all"


def axis_of(kind: str, arguments: Iterable[Any], mesh: Mesh) -> str:
    """``all``, ``shard`` or ``replicate`` for the group among a c10d operator's arguments, ``context`` where it is an
    exchange between parts of rows; ``other`` where its ranks are those of no axis of this process."""
    ranks, rank = _ranks(arguments), dist.get_rank()
    if kind == EXCHANGE:
        own = rank // mesh.context * mesh.context
        return "context" if ranks == list(range(own, own + mesh.context)) else "other"
    first = rank - mesh.place(rank)
    axes = {
        "all": list(range(mesh.replicate * mesh.shard)),
        "shard": list(range(first, first + mesh.shard)),
        "replicate": list(range(mesh.place(rank), mesh.replicate * mesh.shard, mesh.shard)),
    }
    return next((axis for axis, own in axes.items() if own == ranks), "other")


def _ranks(arguments: Iterable[Any]) -> list[int]:
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    return []
