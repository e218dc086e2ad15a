"""What a plan asks of a model beside its traces. Imports no torch, so that it can be kept on disk."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.strategies.memory.base import Holdings


@dataclass(frozen=True)
class Contents:
    """``holdings``: the weights of the whole model. ``vocabulary``: columns of the logits, 0 for a model
    without."""

    holdings: Holdings
    vocabulary: int
