"""A memory model: the bytes that a strategy keeps on one device while a step goes by.

``toolkit plan`` walks through a step, block by block, calls the memory model at each point, and adds the bytes that it
holds to the activations. Formulas are read from the code of the packages, named beside each, and held against
measured bytes by tests/plan/test_truth.py. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.recipe.resolve import Resolved

EMBED, TAIL = -2, -1
"""In place of a block's number: what stands before the blocks (embeddings), and after (last norm, head, loss)."""

Compute = Literal["autocast", "cast", "deepspeed-linear"]
"""How a forward computes in another dtype than the weights are trained in: under torch's autocast, with weights
that are themselves in that dtype, or so and with DeepSpeed's own linear layer."""

_UNPACKED, _STRETCH = 21, 2**22
"""Bytes for each element that 8-bit AdamW works on at once (both moments, one of them padded, divided by its scales, as
int32 and as uint8 codes), and the most elements."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape, and whether it trains and decays."""

    name: str
    shape: tuple[int, ...]
    trains: bool
    decays: bool
    numel: int
    packed: int | None = None
    """Bytes where it is stored quantised; None: in the frozen or trained dtype."""
    statistics: int = 0
    """Bytes that unpack it, whole on every device."""


@dataclass(frozen=True)
class Holdings:
    """What a model holds: the weights of each kind of block, the kind of each block in order, the rest."""

    kinds: Sequence[Sequence[Weight]]
    order: Sequence[int]
    embed: Sequence[Weight]
    """Input embeddings; where ``tied``, the head too."""
    tail: Sequence[Weight]
    """All else that stands in no block: last norm, head."""
    tied: bool
    buffers: int
    """Bytes of buffers."""
    by_name: Mapping[str, Weight] = field(default_factory=dict)

    def unit(self, block: int) -> Sequence[Weight]:
        """The weights of a block, or those before or after the blocks."""
        if block < 0:
            return self.embed if block == EMBED else self.tail
        return self.kinds[self.order[block]]

    def units(self) -> list[tuple[Sequence[Weight], int]]:
        """All weights: lists, and how often each is there."""
        counted = [(self.kinds[kind], self.order.count(kind)) for kind in sorted(set(self.order))]
        return [*counted, (self.embed, 1), (self.tail, 1)]

    def elements(self, trains: bool | None = None) -> int:
        """Elements of the whole model: all, trained or frozen ones."""
        return sum(
            count * sum(w.numel for w in unit if trains is None or w.trains == trains) for unit, count in self.units()
        )

    def frozen_bytes(self, size: int) -> int:
        """Bytes of all frozen weights, ``size`` an element where they are not quantised."""
        return sum(
            count * (w.numel * size if w.packed is None else w.packed)
            for unit, count in self.units()
            for w in unit
            if not w.trains
        )

    def groups(self) -> int:
        """Groups of the optimizer: with decay and without, those that are not empty."""
        return len({w.decays for unit, _ in self.units() for w in unit if w.trains})


class MemoryModel:
    """Base: whole state on every device. Subclasses override what they spread.

    ``resident``: bytes that stay for the whole step, by term of the plan's breakdown. ``gathered``, ``gradients``
    and ``buffers`` change as the step goes by.
    """

    compute_as: ClassVar[Compute]

    def __init__(self, holdings: Holdings, resolved: Resolved) -> None:
        precision = resolved.precision
        self.holdings = holdings
        self.resolved = resolved
        self.ranks = resolved.world_size
        self.compute = BYTES[precision.compute]
        self.trained = BYTES[precision.trainable]
        self.frozen = BYTES[precision.frozen]
        self.mixed = precision.mixed
        self.trains = holdings.elements(True)
        self.freezes = holdings.elements(False)
        self.overlap = resolved.device == "cuda"
        self.assembled = self.trained
        """Bytes an element of a tensor that is put together from the ranks' parts for a checkpoint."""
        self.gathered = self.gradients = self.buffers = 0
        self.resident: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0, "communication": 0}
        self.host: dict[str, int] = {}
        """Bytes of host memory per process, by term."""
        self.account()
        self.resident["parameters"] += holdings.buffers + self.statistics_bytes()

    # ---- to override

    def account(self) -> None:
        """Fill ``resident`` (and ``host``)."""
        raise NotImplementedError

    def start(self, accumulating: bool) -> None:
        """A micro-batch begins; ``accumulating``: gradients of one before are there."""
        self.gathered = self.buffers = 0
        self.gradients = self.trains * self.trained if accumulating else 0
        self.accumulating = accumulating

    def enter(self, block: int, backward: bool) -> int:
        """The forward or backward of a block, EMBED or TAIL begins; returns what that takes for a moment."""
        return 0

    def leave(self, block: int, backward: bool) -> None:
        """... and ends."""

    def gradient(self, weight: Weight, block: int) -> int:
        """A weight's gradient is complete, and still counted with the activations; returns what is alive beside
        the memory model's own just now."""
        if not self.accumulating:
            self.gradients += weight.numel * self.trained
        return 0

    def pass_on(self) -> None:
        """The step goes on: the gradient completed last is no longer counted with the activations."""

    def finish_backward(self) -> int:
        """The last backward of a window has ended; returns what its end takes for a moment."""
        return 0

    def step(self) -> int:
        """What the optimizer's step takes for a moment, beside what stays."""
        if self.resolved.recipe.optimizer.name != "adamw8bit":
            return 0
        # Moments are unpacked for the length of a stretch of one weight (toolkit/optim/adamw8bit.py).
        largest = max((w.numel for unit, _ in self.holdings.units() for w in unit if w.trains), default=0)
        return _UNPACKED * min(largest, _STRETCH)

    def loading(self) -> int:
        """The most weights on the device while the model goes there from the host, before the first step."""
        return self.resident["parameters"]

    def saving(self) -> int:
        """What putting one weight or moment together takes for a moment, beside what stays: the largest one whole, and
        this rank's part of a packed moment unpacked. On the rank that takes most, the one that writes."""
        largest = max((w.numel for unit, _ in self.holdings.units() for w in unit if w.trains), default=0)
        whole = self.assembled * largest
        if self.resolved.recipe.optimizer.name != "adamw8bit":
            return whole
        part = -(-largest // self.ranks) if self.assembled else largest
        # toolkit/optim/adamw8bit.py: codes as int32 while they are looked up; then the part and the whole.
        return max(8 * part, 4 * part + whole)

    # ---- shared

    def moments(self, elements: int) -> int:
        """Bytes of both moments of so many elements."""
        if self.resolved.recipe.optimizer.name == "adamw8bit":
            return 2 * (elements + 4 * -(-elements // 256))
        return 2 * elements * self.trained

    def host_loading(self) -> tuple[int, int]:
        """Host memory of loading: bytes for each process, and bytes that a node's processes share. Every process
        loads the whole model: trained weights into memory of its own, frozen ones in 16 bits by mapping the files,
        which all of a node see once; frozen ones in 32 bits are copies too."""
        frozen = [(w, count) for unit, count in self.holdings.units() for w in unit if not w.trains]
        plain = sum(count * w.numel for w, count in frozen) * self.frozen
        packed = sum(count * (w.packed + w.statistics) for w, count in frozen if w.packed is not None)
        own = self.trains * self.trained + packed
        return (own, plain) if self.frozen == 2 else (own + plain, 0)

    def frozen_bytes(self) -> int:
        """Frozen weights, whole."""
        return self.holdings.frozen_bytes(self.frozen)

    def statistics_bytes(self) -> int:
        """What unpacks quantised weights."""
        return sum(count * w.statistics for unit, count in self.holdings.units() for w in unit)

    def _stored(self, weight: Weight) -> int:
        return weight.numel * self.frozen if weight.packed is None else weight.packed

    def bytes_now(self) -> int:
        """All that the memory model holds at this moment."""
        return sum(self.resident.values()) + self.gathered + self.gradients + self.buffers
