"""Along which axis of the mesh a collective runs, by the ranks of its group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.recipe.mesh import Mesh

EXCHANGE = "all-to-all"
_ELSEWHERE = ("context", "pipeline", "expert")
"""Axes whose ranks are not those that divide layers."""


def axis_of(kind: str, arguments: Iterable[Any], mesh: Mesh) -> str:
    """``all``, ``shard``, ``replicate``, ``tensor``, ``pipeline``, ``ends`` (the first and the last stage) or
    ``copies`` (ranks that have the same experts, or shard them) for the group among a c10d operator's arguments,
    ``context`` where it is an exchange between parts of rows, ``expert`` where it is one between experts; ``other``
    where its ranks are those of no axis of this process."""
    ranks, rank = _ranks(arguments), dist.get_rank()
    if kind == EXCHANGE and mesh.expert > 1:
        return "expert" if ranks == mesh.expert_ranks(rank) else "other"
    if kind == EXCHANGE:
        return "context" if ranks == mesh.context_ranks(rank) else "other"
    peers = mesh.state_peers(rank)
    at = peers.index(rank)
    first = at - mesh.place(rank)
    axes = {
        "pipeline": mesh.stage_ranks(rank) if mesh.pipeline > 1 else None,
        "ends": mesh.stage_ranks(rank)[:: mesh.pipeline - 1] if mesh.pipeline > 2 else None,
        **{axis: mesh.layer_ranks(rank) for axis in mesh.axes if axis not in _ELSEWHERE},
        "all": peers,
        "copies": mesh.expert_copies(rank) if mesh.expert > 1 else None,
        "shard": peers[first : first + mesh.shard],
        "replicate": peers[mesh.place(rank) :: mesh.shard],
        "expert": mesh.expert_ranks(rank) if mesh.expert > 1 else None,
    }
    return next((axis for axis, own in axes.items() if own == ranks), "other")


def _ranks(arguments: Iterable[Any]) -> list[int]:
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # another one: a reduction's kind
                return sorted(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
    return []
