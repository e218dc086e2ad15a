"""Communication of a strategy in one optimizer step, as numbers. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.recipe.resolve import Resolved
from toolkit.strategies.memory.base import BYTES, EMBED, TAIL, Holdings

Axis = str
"""The ranks of a collective: ``all`` that sum gradients, or those of an axis of the mesh by its name; ``pipeline``:
neighbours; ``copies``: those that have the same experts."""


class Sent(NamedTuple):
    """Bytes that a rank sends, in how many collectives, along which axis."""

    size: float
    collectives: float
    axis: Axis = "all"


@dataclass(frozen=True)
class Traffic:
    """What a rank sends, and when it overlaps with compute. A pair of bytes and collectives is one of all ranks."""

    per_micro: tuple[Sent | tuple[float, int], ...] = ()
    """In every micro-batch; overlaps with its backward (and its forward, if ``also_forward``)."""
    at_end: tuple[Sent | tuple[float, int], ...] = ()
    """Once per step."""
    end_overlaps: bool = False
    """Whether the communication once per step overlaps with the last backward."""
    also_forward: bool = False

    def by_axis(self, accumulation: int) -> dict[str, float]:
        """Bytes that a rank sends in one step of so many micro-batches, by axis."""
        found: dict[str, float] = {}
        for times, sends in ((accumulation, self.per_micro), (1, self.at_end)):
            for sent in (Sent(*one) for one in sends):
                found[sent.axis] = found.get(sent.axis, 0.0) + times * sent.size
        return {axis: size for axis, size in found.items() if size}


class Volumes:
    """Bytes that a rank sends to move each part of the training state once around a ring of ``ranks`` (by default all
    that hold the same parts of the layers).

    A ring of N ranks sends (N-1)/N of a tensor for an all-gather or a reduce-scatter, and twice that for an all-reduce
    (Patarasuk and Yuan 2009).
    """

    def __init__(self, resolved: Resolved, holdings: Holdings, ranks: int | None = None) -> None:
        ranks = ranks or resolved.mesh.stage_size // resolved.mesh.columns
        ring = (ranks - 1) / ranks
        precision = resolved.precision
        self.trained_bytes = holdings.elements(True) * BYTES[precision.trainable]
        """Bytes of all gradients, whole."""
        self.gradients = ring * self.trained_bytes
        self.trained_copies = ring * holdings.elements(True) * BYTES[precision.compute]
        """Of the trained weights in the compute dtype."""
        self.weights = self.trained_copies + ring * holdings.frozen_bytes(BYTES[precision.frozen])
        """Of all weights as they are gathered."""
        self.units = len(holdings.order) + 2
        """Groups of weights that are gathered together: each block, what comes before them and after."""


def sharded_traffic(resolved: Resolved, holdings: Holdings, once: Collection[int] = ()) -> Traffic:
    """Sharded weights are gathered for the forward and, unless they stay gathered, for the backward; gradients are
    reduced to their shards, and these are summed over the copies where a mesh has any: in every micro-batch, or in the
    last one of a step (``strategy.sync``).

    ``once``: blocks, EMBED and TAIL that are gathered for the forward alone.
    """
    holdings = holdings.without_frozen(resolved.whole_blocks)
    mesh = resolved.mesh
    axes: tuple[Axis, Axis] = ("shard" if mesh.hybrid else "all", "copies")
    gathers = 2 if resolved.recipe.strategy.reshard_after_forward else 1
    gathered, reduced = [], []
    for axis, (own, ranks) in zip(axes, holdings.shares(resolved), strict=False):
        volumes = Volumes(resolved, own, ranks)
        saved = Volumes(resolved, _of(own, once), ranks).weights if gathers > 1 else 0.0
        units = gathers * volumes.units - (len(once) if gathers > 1 else 0)
        gathered.append(Sent(gathers * volumes.weights - saved, units, axis))
        reduced.append(Sent(volumes.gradients, volumes.units, axis))
        if mesh.hybrid:
            between = 2 * (mesh.replicate - 1) / mesh.replicate
            reduced.append(Sent(between * volumes.trained_bytes / ranks, volumes.units, "replicate"))
    if resolved.reduces_each_micro_batch:
        return Traffic((*gathered, *reduced), also_forward=True)
    if gathers == 1:  # weights stay gathered until the last backward
        return Traffic(at_end=(*gathered, *reduced), end_overlaps=True)
    return Traffic(tuple(gathered), at_end=tuple(reduced), end_overlaps=True, also_forward=True)


def _of(holdings: Holdings, blocks: Collection[int]) -> Holdings:
    """These blocks, EMBED and TAIL alone."""
    order = [holdings.order[block] for block in blocks if block >= 0]
    embed, tail = (unit if block in blocks else [] for block, unit in ((EMBED, holdings.embed), (TAIL, holdings.tail)))
    return replace(holdings, order=order, embed=embed, tail=tail)


def second_copy_traffic(resolved: Resolved, holdings: Holdings) -> Traffic:
    """ZeRO-3 with hpZ: weights that train are gathered from all ranks at their first use in a step, and from then on
    from the group's second copy; frozen ones always from it. Gradients are reduced over all ranks."""
    group, everywhere = Volumes(resolved, holdings, resolved.mesh.shard), Volumes(resolved, holdings)
    micro_batches = resolved.accumulation
    first = Sent(everywhere.trained_copies, everywhere.units)
    later = Sent(
        2 * group.weights - group.trained_copies / micro_batches, (2 - 1 / micro_batches) * group.units, "shard"
    )
    return Traffic((later, Sent(everywhere.gradients, everywhere.units)), at_end=(first,), also_forward=True)
