"""Predictions for the recipe on 1 to 1,024 devices: memory per device, time, the share of communication, and which
mesh is the fastest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.candidate import Candidate
from toolkit.planning.loops import check_loop
from toolkit.planning.search import Search
from toolkit.recipe.schema import Recipe
from toolkit.recipe.traits import Traits
from toolkit.strategies import resolve, simplest, strategies

_DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PER_NODE = 8
_PARTS = (2, 4, 8)
"""Ranks that divide rows or layers between them: all of them in one node."""
_STAGES = (2, 4, 8)


def on_paper(search: Search) -> list[dict[str, Any]]:
    """A row per number of devices, strategy and mesh that the recipe can have. Each has the asked micro-batch and
    accumulation, so that the global batch grows with the devices that have rows of their own. ``fastest``: of the rows
    of this number of devices that fit, the one with the most samples a second.

    What the training loop that is planned for does not have is left out."""
    rows = []
    for count in _DEVICES:
        per_node = min(count, _PER_NODE)
        own = [_row(one) for one in _candidates(search, per_node, count // per_node)]
        if best := _fastest(own):
            best["fastest"] = True
        rows += own
    return rows


def fastest_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the rows of each number of devices one per strategy: the fastest that fits, or else the smallest."""
    best: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        best.setdefault((row["devices"], row["strategy"].split()[0]), []).append(row)
    return [_fastest(same) or min(same, key=lambda row: row["peak_bytes"]) for same in best.values()]


def meshes(traits: Traits, per_node: int, nodes: int) -> Iterator[dict[str, int] | None]:
    """``strategy.mesh`` of every arrangement of ``per_node`` x ``nodes`` devices: state sharded over all of them, or
    within a node where the strategy can; rows, layers, both, or experts divided within a node, or none of them; or
    blocks in stages. A recipe may refuse some."""
    whole = "shard" if traits.shards else "replicate"
    divided = ["context", *({"tensor"} & traits.layouts)]
    parts = [("context", 1), *((axis, size) for axis in divided for size in _PARTS if size <= per_node)]
    for axis, size in parts:
        rest = per_node * nodes // size
        yield None if size == 1 else {axis: size} | ({whole: rest} if rest > 1 else {})
        if traits.hybrid and nodes > 1 and per_node > size:
            yield {axis: size, "shard": per_node // size, "replicate": nodes}
    for size, layers in product(_PARTS, _PARTS) if "tensor" in divided else ():
        if size * layers <= per_node:
            rest = per_node * nodes // (size * layers)
            yield {"context": size, "tensor": layers} | ({whole: rest} if rest > 1 else {})
    for size in _PARTS if "expert" in traits.layouts else ():
        if size <= per_node:
            rest = per_node * nodes // size
            yield {"expert": size} | ({whole: rest} if rest > 1 else {})
            if rest > 1:  # where ranks have fewer experts than could shard them
                yield {"expert": size, "replicate": rest}
    for stages in _STAGES if "pipeline" in traits.layouts else ():
        rest = per_node * nodes // stages
        if rest >= 1:
            yield {"pipeline": stages} | ({whole: rest} if rest > 1 else {})
        if traits.hybrid and rest > per_node:
            yield {"pipeline": stages, "shard": per_node, "replicate": rest // per_node}


def _candidates(search: Search, per_node: int, nodes: int) -> Iterable[Candidate]:
    alone = per_node * nodes == 1
    for name, strategy in strategies().items():
        if alone:
            if name == simplest(lambda other: not other.traits.distributed):
                yield from _candidate(search, {"name": name}, per_node, nodes)
        elif strategy.traits.distributed:
            for mesh in meshes(strategy.traits, per_node, nodes):
                yield from _candidate(search, {"name": name, "mesh": mesh}, per_node, nodes)


def _candidate(search: Search, strategy: dict[str, Any], per_node: int, nodes: int) -> Iterator[Candidate]:
    """One, or none where the recipe and the strategy contradict each other."""
    values = search.asked.recipe.model_dump(exclude_unset=True)
    values["strategy"] = strategy
    values["machine"] = values.get("machine", {}) | {"processes": per_node, "nodes": nodes}
    values["batch"] = {"micro_size": search.asked.micro_size, "accumulation": search.asked.accumulation}
    with contextlib.suppress(InputError):
        resolved = resolve(Recipe.model_validate(values), search.asked.source, device=search.asked.device)
        check_loop(search.loop, resolved)
        yield search.candidate(resolved)


def _row(candidate: Candidate) -> dict[str, Any]:
    resolved, seconds = candidate.resolved, candidate.seconds
    mesh = resolved.mesh
    parts = mesh.axes
    words = [resolved.recipe.strategy.name]
    words += ["hybrid"] if mesh.hybrid else []
    words += [f"{axis} {size}" for axis, size in parts.items()]
    return {
        "devices": resolved.world_size,
        "strategy": " ".join(words),
        "mesh": {"replicate": mesh.replicate, "shard": mesh.shard} | parts,
        "sent_bytes": {axis: round(size) for axis, size in candidate.sent.items()},
        "peak_bytes": candidate.peak,
        "fits": candidate.fits,
        "seconds": None if seconds is None else seconds.total,
        "waiting": None if seconds is None else seconds.exposed / seconds.total,
        "bubble": None if seconds is None else seconds.bubble / seconds.total,
        "samples_per_second": None if seconds is None else resolved.global_size / seconds.total,
        "fastest": False,
    }


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    able = [row for row in rows if row["fits"] and row["samples_per_second"] is not None]
    return max(able, key=lambda row: float(row["samples_per_second"]), default=None)
