"""One traced step: segments inside and outside of blocks, with the live bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolkit.planning.images import Images
from toolkit.planning.loops import LOOPS, Loop
from toolkit.planning.work import Work
from toolkit.recipe.schema import CheckpointingName
from toolkit.strategies.memory.base import Compute

OUTSIDE = -1


@dataclass(frozen=True)
class Shape:
    """What a trace depends on. ``compute``: see toolkit/strategies/memory/base.py."""

    checkpointing: CheckpointingName
    micro: int
    length: int
    compute: Compute
    fused: bool = False
    """Whether the head answers with the loss (``loss: fused``)."""
    masked: bool = False
    """Whether rows hold several samples that a mask keeps apart."""
    loop: Loop = LOOPS["toolkit"]
    """The training loop whose loss it is."""
    images: Images | None = None
    """What each row contains, for models that see."""
    parts: int = 1
    """Ranks that divide the tokens of each row; ``length`` is a whole row's."""
    evaluates: bool = False
    """Whether it is a forward of an evaluation: without gradients, dropout and a backward."""

    @property
    def autocast(self) -> bool:
        return self.compute == "autocast"


@dataclass
class Gradient:
    """The gradient of one weight is complete. ``live``: bytes alive just then, itself included; ``peak``: the
    highest since the one before, or since the segment began."""

    weight: str
    live: int
    peak: int


@dataclass
class Segment:
    """A stretch of the step inside one block, or outside of all (``OUTSIDE``), in the order of time.

    ``start`` and ``peak``: bytes alive at its begin and at its highest. ``held``: bytes alive at its begin that
    each block allocated."""

    block: int
    backward: bool
    start: int
    peak: int = 0
    """From the last finished gradient on, or from the begin where there was none."""
    held: dict[int, int] = field(default_factory=dict)
    flops: int = 0
    work: Work = field(default_factory=Work)
    exchanged: int = 0
    """Bytes of this rank that exchanges between parts of rows send and receive, its own for itself among them."""
    exchanges: int = 0
    summed: int = 0
    """Bytes that it adds up with the ranks that divide its layers, or rows that it gives to those that divide its
    experts."""
    sums: int = 0
    gradients: list[Gradient] = field(default_factory=list)


@dataclass
class Traced:
    """The segments of one micro-batch, with what the model of the trace looks like."""

    shape: Shape
    segments: list[Segment]
    attention: tuple[str, ...]
    slowly: str = ""
    """Why meta tensors could not be used; empty if they were, or were not tried."""
