"""How a run's samples are spread over steps, micro-batches and ranks, as six numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """One rank's share of the run; ``start_window`` is the first optimizer step wanted."""

    micro_size: int
    accumulation: int
    world_size: int
    rank: int
    seed: int
    shuffle: bool
    start_window: int = 0

    @property
    def global_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_size * self.accumulation * self.world_size
