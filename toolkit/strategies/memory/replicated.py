"""single and ddp: the whole state on every device."""

from __future__ import annotations

from toolkit.strategies.memory.base import MemoryModel

BUCKET = 25 * 2**20
"""Bytes of gradients that are reduced together (torch/nn/parallel/distributed.py, ``bucket_cap_mb``)."""


class SingleMemory(MemoryModel):
    """Trained weights, their gradients and two moments in the trained dtype; frozen weights in theirs."""

    compute_as = "autocast"

    def account(self) -> None:
        self.resident["parameters"] = self.trains * self.trained + self.frozen_bytes()
        self.resident["optimizer"] = self.moments(self.trains)


class DdpMemory(SingleMemory):
    """And a bucket copy of every gradient (torch/csrc/distributed/c10d/reducer.cpp; accelerate 1.15.0 leaves
    ``gradient_as_bucket_view`` off). Where ranks are stages, copies of one average their gradients bucket by bucket
    when the last backward has ended (toolkit/strategies/engines/replicated.py)."""

    def account(self) -> None:
        super().account()
        if self.resolved.mesh.pipeline == 1:
            self.resident["communication"] = self.trains * self.trained

    def finish_backward(self) -> int:
        if self.resolved.mesh.pipeline == 1 or self.resolved.mesh.replicate == 1:
            return 0
        trained = [w for unit, count in self.holdings.units() for _ in range(count) for w in unit if w.trains]
        largest = size = 0
        for weight in trained:
            size = (0 if size >= BUCKET else size) + weight.numel * self.trained
            largest = max(largest, size)
        return largest
