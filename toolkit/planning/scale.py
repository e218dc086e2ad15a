"""Predictions for the recipe on 1 to 1,024 devices: memory per device, time, and the share of communication."""

from __future__ import annotations

from typing import Any

from toolkit.errors import InputError
from toolkit.planning.loops import check_loop
from toolkit.planning.search import Search
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, simplest, strategies

_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PER_NODE = 8


def on_paper(search: Search) -> list[dict[str, Any]]:
    """A row per number of devices and strategy that shards gradients, and one more where it can shard within a node
    and replicate over nodes. Each has the asked micro-batch and accumulation, so that the global batch grows with the
    devices. What the training loop that is planned for does not have is left out."""
    rows: list[dict[str, Any] | None] = []
    for count in _DEVICES:
        per_node = min(count, _PER_NODE)
        for name, strategy in strategies().items():
            if "gradients" not in strategy.traits.shards:
                continue
            rows.append(_row(search, name, per_node, count // per_node))
            if strategy.traits.hybrid and count > _PER_NODE:
                rows.append(_row(search, name, per_node, count // per_node, hybrid=True))
    return [row for row in rows if row is not None]


def _row(search: Search, name: str, per_node: int, nodes: int, hybrid: bool = False) -> dict[str, Any] | None:
    values = search.asked.recipe.model_dump(exclude_unset=True)
    alone = per_node * nodes == 1
    strategy = simplest(lambda other: not other.traits.distributed) if alone else name
    values["strategy"] = {"name": strategy} | ({"mesh": {"replicate": nodes, "shard": per_node}} if hybrid else {})
    values["machine"] = values.get("machine", {}) | {"processes": per_node, "nodes": nodes}
    values["batch"] = {"micro_size": search.asked.micro_size, "accumulation": search.asked.accumulation}
    resolved = resolve(Recipe.model_validate(values), search.asked.source, device=search.asked.device)
    try:
        check_loop(search.loop, resolved)
    except InputError:
        return None
    candidate = search.candidate(resolved)
    seconds = candidate.seconds
    return {
        "devices": per_node * nodes,
        "strategy": f"{strategy} hybrid" if hybrid else strategy,
        "mesh": {"replicate": resolved.mesh.replicate, "shard": resolved.mesh.shard},
        "sent_bytes": {axis: round(size) for axis, size in candidate.sent.items()},
        "peak_bytes": candidate.peak,
        "fits": candidate.fits,
        "seconds": None if seconds is None else seconds.total,
        "waiting": None if seconds is None else seconds.exposed / seconds.total,
    }
