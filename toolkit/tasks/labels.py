"""Where a sample's labels are, and which of them have a loss."""

from __future__ import annotations

import struct
from enum import Enum

IGNORED = -100
"""Label of positions without loss: torch's cross entropy ignores it."""


def number_bits(value: float) -> int:
    """A number as a label: the bits of its float32, read as a signed integer of 32 bits. All labels are integers then,
    and none of a number is IGNORED, which are the bits of a NaN. Raises OverflowError beyond float32's range."""
    found: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return found


def number_of(bits: int) -> float:
    """The number of a label that ``number_bits`` made."""
    found: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return found


class Labels(Enum):
    """How labels belong to a sample's input."""

    NEXT = "next token"
    """One for each input token; each is predicted at the token before it, the first never."""
    TOKEN = "token"
    """One for each input token, predicted there."""
    TARGET = "target"
    """A sequence of its own length, which a decoder predicts."""
    SAMPLE = "sample"
    """One integer for the sample: a class, or the bits of a number."""

    @property
    def counted(self) -> str:
        """What has a loss, in words: where a sample has one label, samples."""
        return "samples" if self is Labels.SAMPLE else "tokens"

    @property
    def under_input(self) -> bool:
        """Whether there are as many as input tokens."""
        return self in (Labels.NEXT, Labels.TOKEN)

    def predicted(self, labels: list[int]) -> list[int]:
        """Those that any position predicts."""
        return labels[1:] if self is Labels.NEXT else labels

    def supervised(self, labels: list[int] | int) -> int:
        """Number of predictions with loss. A causal model's first position is never predicted (transformers shifts
        labels by one), so it does not count."""
        if isinstance(labels, int):
            return int(labels != IGNORED)
        predicted = self.predicted(labels)
        return len(predicted) - predicted.count(IGNORED)
