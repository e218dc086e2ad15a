"""single and ddp: the whole state on every device."""

from __future__ import annotations

from toolkit.strategies.memory.base import MemoryModel


class SingleMemory(MemoryModel):
    """Trained weights, their gradients and two moments in the trained dtype; frozen weights in theirs."""

    compute_as = "autocast"

    def account(self) -> None:
        self.resident["parameters"] = self.trains * self.trained + self.frozen_bytes()
        self.resident["optimizer"] = self.moments(self.trains)


class DdpMemory(SingleMemory):
    """And a bucket copy of every gradient (torch/csrc/distributed/c10d/reducer.cpp; accelerate 1.15.0 leaves
    ``gradient_as_bucket_view`` off)."""

    def account(self) -> None:
        super().account()
        self.resident["communication"] = self.trains * self.trained
