"""Communication of a strategy in one optimizer step, as numbers. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipe.resolve import Resolved
from toolkit.strategies.memory.base import BYTES, Holdings


@dataclass(frozen=True)
class Traffic:
    """Pairs of (bytes that a rank sends, number of collectives), and when they overlap with compute."""

    per_micro: tuple[tuple[float, int], ...] = ()
    """In every micro-batch; overlaps with its backward (and its forward, if ``also_forward``)."""
    at_end: tuple[tuple[float, int], ...] = ()
    """Once per step."""
    end_overlaps: bool = False
    """Whether the communication once per step overlaps with the last backward."""
    also_forward: bool = False


class Volumes:
    """Bytes that a rank sends to move each part of the training state once.

    A ring of N ranks sends (N-1)/N of a tensor for an all-gather or a reduce-scatter, and twice that for an all-reduce
    (Patarasuk and Yuan 2009).
    """

    def __init__(self, resolved: Resolved, holdings: Holdings) -> None:
        ring = (resolved.world_size - 1) / resolved.world_size
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


def sharded_traffic(resolved: Resolved, holdings: Holdings) -> Traffic:
    """Sharded weights are gathered for the forward and, unless they stay gathered, for the backward; gradients are
    reduced to their shards."""
    volumes = Volumes(resolved, holdings)
    gathers = 2 if resolved.recipe.strategy.reshard_after_forward else 1
    return Traffic(
        ((gathers * volumes.weights, gathers * volumes.units), (volumes.gradients, volumes.units)), also_forward=True
    )
