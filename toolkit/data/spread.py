"""How a run's samples are divided into steps, micro-batches and data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """One data-parallel rank's share of the run; ``start_window`` is the first optimizer step wanted."""

    micro_size: int
    accumulation: int
    data_size: int
    """Data-parallel size; ranks that share a batch count once."""
    data_rank: int
    seed: int
    shuffle: bool
    start_window: int = 0
    one_row: bool = False
    """Packed samples of a micro-batch are in one row, without padding (see ``takes_one_row``)."""

    @property
    def global_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_size * self.accumulation * self.data_size


def takes_one_row(attention: str | None) -> bool:
    """Whether packed samples go to this attention in one row: flash attention takes sequences of any lengths one after
    another, and only so (transformers' ``_is_packed_sequence`` wants a batch of one); the others take a mask, whose
    size is the square of a row."""
    return attention is not None and attention.startswith("flash")
