"""single and ddp: the whole state on every device."""

from __future__ import annotations

from toolkit.recipe.resolve import Resolved
from toolkit.strategies.memory.base import Holdings, MemoryModel

BUCKET = 25 * 2**20
"""Bytes of gradients that are reduced together (torch/nn/parallel/distributed.py, ``bucket_cap_mb``)."""


def expert_elements(holdings: Holdings, resolved: Resolved) -> int:
    """Elements that train of one rank's part of divided experts."""
    if resolved.mesh.expert == 1:
        return 0
    return sum(count * w.numel for unit, count in holdings.units() for w in unit if w.trains and w.ranks > 1)


class SingleMemory(MemoryModel):
    """Trained weights, their gradients and two moments in the trained dtype; frozen weights in theirs."""

    compute_as = "autocast"

    def account(self) -> None:
        self.resident["parameters"] = self.trains * self.trained + self.frozen_bytes()
        self.resident["optimizer"] = self.moments(self.trains)


class DdpMemory(SingleMemory):
    """And a bucket copy of every gradient (torch/csrc/distributed/c10d/reducer.cpp; accelerate 1.15.0 leaves
    ``gradient_as_bucket_view`` off). Where ranks are stages, copies of one average their gradients bucket by bucket
    when the last backward has ended (toolkit/strategies/engines/stages.py)."""

    def account(self) -> None:
        super().account()
        if self.resolved.mesh.pipeline == 1:
            self.resident["communication"] = (self.trains - self.divided_experts()) * self.trained

    def divided_experts(self) -> int:
        """Elements of this rank's experts that train where ranks divide them: DDP leaves their gradients alone."""
        return expert_elements(self.holdings, self.resolved)

    def finish_backward(self) -> int:
        if self.resolved.mesh.pipeline == 1 or self.resolved.mesh.replicate == 1:
            return 0
        experts = self.resolved.mesh.expert > 1  # theirs are summed one by one, where they are
        trained = [w for unit, count in self.holdings.units() for _ in range(count) for w in unit
                   if w.trains and not (experts and w.ranks > 1)]  # fmt: skip
        largest = size = 0
        for weight in trained:
            size = (0 if size >= BUCKET else size) + weight.numel * self.trained
            largest = max(largest, size)
        return largest
