"""A memory model: the bytes that a strategy uses on one device during a step.

``toolkit plan`` walks through a step, block by block, calls the memory model at each point, and adds its bytes to the
activations. Formulas come from the source code of the packages, cited with each, and are compared with measured bytes
by tests/plan/test_truth.py. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from toolkit.machine import READ_AT_ONCE
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.adapter_methods import adapter_reads_base
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.tokenizer_facts import added_tokens
from toolkit.rooms import state_bytes

EMBED, TAIL = -2, -1
"""Used as block numbers: the weights before the blocks (embeddings), and after (last norm, head, loss)."""

Compute = Literal["autocast", "cast", "deepspeed-linear"]
"""How a forward computes in another dtype than the weights are trained in: under torch's autocast, with weights
that are themselves in that dtype, or so and with DeepSpeed's own linear layer."""

_UNPACKED, _STRETCH = 21, 2**22
"""Bytes for each element that 8-bit AdamW works on at once (both moments, one of them padded, divided by its scales, as
int32 and as uint8 codes), and the most elements."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by torch's names of dtypes."""


@dataclass(frozen=True)
class Weight:
    """One parameter: its shape, whether it is trainable, and whether it has weight decay.

    ``shape`` and ``numel`` (elements) are those of the whole tensor, unpacked if it is stored quantised.
    """

    name: str
    shape: tuple[int, ...]
    trains: bool
    decays: bool
    numel: int
    packed: int | None = None
    """Bytes if it is stored quantised; None: in the frozen or trained dtype."""
    statistics: int = 0
    """Bytes of its quantisation statistics, whole on every device."""
    group: int = -1
    """Number of its group in the recipe's ``optimizer.groups``; -1: in none."""
    matrix: bool = False
    """Whether it is a matrix of a hidden layer that trains."""
    ranks: int = 1
    """Ranks that divide it (``strategy.mesh``: ``tensor``, ``expert``): then ``shape`` and ``numel`` are a part's."""


@dataclass(frozen=True)
class Holdings:
    """The weights of a model: those of each kind of block, the kind of each block in order, and the rest."""

    kinds: Sequence[Sequence[Weight]]
    order: Sequence[int]
    embed: Sequence[Weight]
    """Input embeddings; if ``tied``, also the head."""
    tail: Sequence[Weight]
    """All other weights outside of blocks: last norm, head."""
    tied: bool
    buffers: int
    """Bytes of buffers."""
    by_name: Mapping[str, Weight] = field(default_factory=dict)
    """Every weight of the short model that is traced (``planning.skeleton``), by parameter name."""

    def unit(self, block: int) -> Sequence[Weight]:
        """The weights of a block, or those before or after the blocks."""
        if block < 0:
            return self.embed if block == EMBED else self.tail
        return self.kinds[self.order[block]]

    def units(self) -> list[tuple[Sequence[Weight], int]]:
        """All weights: lists, and how often each is there."""
        counted = [(self.kinds[kind], self.order.count(kind)) for kind in sorted(set(self.order))]
        return [*counted, (self.embed, 1), (self.tail, 1)]

    def elements(self, trains: bool | None = None, whole: bool = False) -> int:
        """Elements of the model: all, trained or frozen ones; of divided weights those of one part, or ``whole``."""
        return sum(
            count * sum(w.numel * (w.ranks if whole else 1) for w in unit if trains is None or w.trains == trains)
            for unit, count in self.units()
        )

    def only(self, divided: bool) -> Holdings:
        """The weights that ranks divide alone, or all others alone."""

        def of(unit: Sequence[Weight]) -> list[Weight]:
            return [w for w in unit if (w.ranks > 1) == divided]

        return replace(self, kinds=[of(kind) for kind in self.kinds], embed=of(self.embed), tail=of(self.tail))

    def without_frozen(self, blocks: int) -> Holdings:
        """All but the frozen weights of so many blocks, from the first."""
        trained = [[w for w in kind if w.trains] for kind in self.kinds]
        order = [kind + len(self.kinds) * (place < blocks) for place, kind in enumerate(self.order)]
        return replace(self, kinds=[*self.kinds, *trained], order=order)

    def frozen_bytes(self, size: int) -> int:
        """Bytes of all frozen weights, ``size`` an element where they are not quantised."""
        return sum(
            count * (w.numel * size if w.packed is None else w.packed)
            for unit, count in self.units()
            for w in unit
            if not w.trains
        )

    def shares(self, resolved: Resolved) -> list[tuple[Holdings, int]]:
        """The weights, by the number of ranks that divide what a strategy shards of them: experts are sharded over the
        ranks that have the same ones."""
        mesh = resolved.mesh
        if mesh.expert == 1:
            return [(self, resolved.state_ranks)]
        return [(self.only(False), resolved.state_ranks), (self.only(True), mesh.expert_shards)]

    def groups(self) -> int:
        """Groups of the optimizer, those that are not empty."""
        return len(self.group_keys())

    def group_sizes(self) -> dict[tuple[int, bool], int]:
        """Elements that train, by group of the optimizer."""
        sizes: dict[tuple[int, bool], int] = {}
        for unit, count in self.units():
            for w in unit:
                if w.trains:
                    sizes[w.group, w.decays] = sizes.get((w.group, w.decays), 0) + count * w.numel
        return sizes

    def group_keys(self) -> list[tuple[int, bool]]:
        """The groups of the optimizer: the recipe's and all other weights, each with decay and without."""
        return sorted({(w.group, w.decays) for unit, _ in self.units() for w in unit if w.trains}, reverse=True)


class MemoryModel:
    """Base class: whole state on every device. Subclasses override what they shard.

    ``resident``: bytes that stay for the whole step, by term of the plan's breakdown. ``gathered`` (whole weights that
    were put together from shards), ``gradients`` and ``buffers`` (of communication) are bytes that change during the
    step. ``trains`` and ``freezes``: elements of the whole model. ``compute``, ``trained`` and ``frozen``: bytes per
    element. Methods return bytes on one device unless they say otherwise.
    """

    compute_as: ClassVar[Compute]

    def __init__(self, holdings: Holdings, resolved: Resolved) -> None:
        precision = resolved.precision
        self.holdings = holdings
        self.resolved = resolved
        self.ranks = resolved.state_ranks
        """Ranks that divide what the strategy shards."""
        self.optimizer = optimizer_kind(resolved.recipe.optimizer.name)
        self.compute = BYTES[precision.compute]
        self.trained = BYTES[precision.trainable]
        self.frozen = BYTES[precision.frozen]
        self.mixed = precision.mixed
        self.trains = holdings.elements(True)
        self.freezes = holdings.elements(False)
        self.overlap = resolved.device == "cuda"
        self.wraps_layers = False
        """Of the training loop (planning/loops/base.py): whether FSDP1 has each layer that trains beside frozen weights
        by itself."""
        self.gathered = self.gradients = self.buffers = 0
        self.fetched = 0
        """Bytes that a forward has on their way for later blocks, from a block's ``enter`` to its end."""
        self.resident: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0, "communication": 0}
        self.host: dict[str, int] = {}
        """Bytes of host memory per process, by term."""
        self.account()
        self.resident["parameters"] += holdings.buffers + self.statistics_bytes()

    # ---- to override

    @property
    def leaks_inputs(self) -> bool:
        """Whether blocks' inputs, with their gradients, stay until the backward ends, where checkpointing is
        reentrant."""
        return False

    def account(self) -> None:
        """Fill ``resident`` (and ``host``). Called by the constructor, before buffers and statistics are added."""
        raise NotImplementedError

    def start(self, accumulating: bool) -> None:
        """Start of a micro-batch; ``accumulating``: gradients of an earlier one exist."""
        self.gathered = self.buffers = self.fetched = 0
        self.gradients = self.trains * self.trained if accumulating else 0
        self.accumulating = accumulating

    def enter(self, block: int, backward: bool) -> int:
        """Start of the forward or backward of a block, EMBED or TAIL; returns the bytes that are there just now, beside
        ``gathered``, ``gradients`` and ``buffers``."""
        return 0

    def leave(self, block: int, backward: bool) -> None:
        """End of that forward or backward."""

    def gradient(self, weight: Weight, block: int) -> int:
        """A weight's gradient is complete, and still counted with the activations; returns what is alive beside
        the memory model's own just now."""
        if not self.accumulating:
            self.gradients += weight.numel * self.trained
        return 0

    def pass_on(self) -> None:
        """Continue after a gradient: it is no longer counted with the activations."""

    def finish_backward(self) -> int:
        """End of the last backward of a window; returns the bytes that are there just now."""
        return 0

    def step(self) -> int:
        """Bytes that exist only during the optimizer's step."""
        if not self.optimizer.packed:
            return self.temporary()
        # Moments are unpacked for the length of a stretch of one weight (toolkit/optim/adamw8bit.py).
        largest = max((w.numel for unit, _ in self.holdings.units() for w in unit if w.trains), default=0)
        return _UNPACKED * min(largest, _STRETCH)

    def evaluating(self) -> tuple[int, int]:
        """What an evaluation at the optimizer's average has on the device beside what stays: a copy of the trained
        weights that this rank updates, and, while they are exchanged, the average of the largest tensor of them
        (toolkit/training/average.py). Nothing where they are in host memory."""
        if self.resolved.recipe.strategy.offload != "none":
            return 0, 0
        divided = {"optimizer", "weights"} & set(self.resolved.traits.shards)
        own = self.own_elements() if divided else self.trains
        return own * self.trained, self.largest_master() * self.trained

    def largest_master(self) -> int:
        """Elements of the largest tensor that this rank's optimizer updates."""
        largest = max((w.numel for unit, _ in self.holdings.units() for w in unit if w.trains), default=0)
        return self.part_of_one(largest) if "weights" in self.resolved.traits.shards else largest

    def loading(self) -> int:
        """Maximum bytes of weights on the device while the model is moved there, before the first step."""
        return self.resident["parameters"]

    def saving(self) -> int:
        """What copying this rank's pieces to the host takes temporarily, beside what stays: nothing, but where moments
        are packed, this rank's part of the largest one unpacked."""
        if not self.optimizer.packed:
            return 0
        largest = max((w.numel for unit, _ in self.holdings.units() for w in unit if w.trains), default=0)
        part = -(-largest // self.ranks) if "optimizer" in self.resolved.traits.shards else largest
        return 8 * part  # toolkit/optim/adamw8bit.py: codes as int32 while they are looked up

    # ---- shared

    def moments(self, elements: int) -> int:
        """Bytes of the optimizer's state of this many elements, a part of all that train. In 8 bits: a code per element
        and a float32 scale per 256 (arXiv:2110.02861; toolkit/optim/adamw8bit.py). A factored state is whole on every
        device (toolkit/optim/adafactor.py). What options keep of each element is added."""
        return self._state(elements) + state_bytes(self.resolved.recipe, elements)

    def _state(self, elements: int) -> int:
        """Bytes of the optimizer's state alone."""
        if self.optimizer.packed:
            return 2 * (elements + 4 * -(-elements // 256))
        state = sum(
            count * int(self.optimizer.state(w.shape, w.matrix, self.trained))
            for unit, count in self.holdings.units()
            for w in unit
            if w.trains
        )
        if not self.optimizer.tensors(self.resolved.recipe.optimizer, (1, 1), True):
            return 0  # SGD without momentum
        return state if self.optimizer.factored else -(-state * elements // max(1, self.trains))

    def temporary(self) -> int:
        """Bytes that updating the weight that takes most needs for that time alone."""
        weights = [w for unit, _ in self.holdings.units() for w in unit if w.trains]
        return int(max(map(self.updating, weights), default=0)) + self.group_copies() + self._norm_copies()

    def updating(self, weight: Weight) -> float:
        """Bytes that updating one weight needs for that time alone."""
        ranks = self.ranks if "weights" in self.resolved.traits.shards else 1
        return self.optimizer.temporary(weight.shape, weight.matrix, self.trained, ranks)

    def _norm_copies(self) -> int:
        """``run.group_norms``: a copy of the weights that this rank owns, as it is before the step
        (toolkit/training/group_norms.py). Ranks that hold the same weights divide them."""
        if not self.resolved.recipe.run.group_norms or self.resolved.recipe.strategy.offload != "none":
            return 0
        return -(-self.trains // self.resolved.world_size) * self.trained

    def group_copies(self) -> int:
        """Bytes that a step copies of the tensors of one parameter group, of the group where they are most; 0 if the
        state is updated on the host."""
        if self.resolved.recipe.strategy.offload != "none":
            return 0
        shards = "optimizer" in self.resolved.traits.shards
        section = self.resolved.recipe.optimizer
        shares = self.holdings.shares(self.resolved) if shards else [(self.holdings, 1)]
        return max(
            (
                self.optimizer.copies(section, decays) * -(-size // ranks) * self.trained
                for holdings, ranks in shares
                for (_, decays), size in holdings.group_sizes().items()
            ),
            default=0,
        )

    def own_elements(self) -> int:
        """Elements that train of what the strategy shards, on this device."""
        return sum(-(-own.elements(True) // ranks) for own, ranks in self.holdings.shares(self.resolved))

    def host_loading(self) -> tuple[int, int]:
        """Host memory of loading: bytes for each process, and bytes that a node's processes share.

        By part: what stays on the host, an adapter, which is drawn whole, and what reading or drawing one weight takes.
        Otherwise every process loads the whole model: trained weights into memory of its own, frozen ones in 16 bits by
        mapping the files, which all of a node see once; frozen ones in 32 bits are copies too, and so are parts of
        divided ones."""
        if self.by_part():
            held = self.host.get("parameters", 0) if self.overlap else self.loading()  # on a CPU the device is the host
            return held + self.adapter_loading() + self.reading(), 0
        frozen = [(w, count) for unit, count in self.holdings.units() for w in unit if not w.trains]
        unread = self.resolved.stored is not None  # what the files have packed is never there in 16 bits
        plain = sum(count * w.numel * w.ranks for w, count in frozen if not (unread and w.packed is not None))
        plain *= self.frozen
        parts = sum(count * w.numel for w, count in frozen if w.ranks > 1) * self.frozen
        packed = sum(count * (w.packed + w.statistics) for w, count in frozen if w.packed is not None)
        own = self.holdings.elements(True, whole=True) * self.trained + packed + parts
        return (own, plain) if self.frozen == 2 else (own + plain, 0)

    def by_part(self) -> bool:
        """Whether each process reads its part of the weights alone (toolkit/model/sources.py). 4-bit weights are packed
        from whole ones, some adapters start from values of the base, and so do rows of new tokens."""
        adapter = self.resolved.recipe.adapter
        reads = adapter is not None and adapter_reads_base(adapter)
        grows = bool(added_tokens(self.resolved.recipe))
        mesh = self.resolved.mesh
        parts = "weights" in self.resolved.traits.shards or mesh.pipeline > 1
        return parts and not (reads or grows or self.resolved.base_storage)

    def adapter_loading(self) -> int:
        """Bytes on the host of an adapter before it is sharded."""
        return 0 if self.resolved.recipe.adapter is None else self.trains * self.trained

    def reading(self) -> int:
        """Bytes on the host that it takes to read or draw this rank's part of one weight (toolkit/model/sources.py), of
        the weight where they are most: a stretch of the file and its cast; of weights that transformers puts together
        out of several, at most the sources and each operation's result, whole; of random ones one whole, in float32."""
        sizes = [
            (w.numel * w.ranks, self.trained if w.trains else self.frozen)
            for unit, _ in self.holdings.units()
            for w in unit
        ]
        config = self.resolved.facts.config or {}
        kept = BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."), 4)
        if self.resolved.recipe.model.path is None:
            return max(4 * size + (width < 4) * width * self._read_at_once(size) for size, width in sizes)
        if (operations := _operations(str(config.get("model_type")))) is not None:
            return max((1 + operations) * size * width for size, width in sizes)
        # What has the file's dtype already needs no cast.
        return max(self._read_at_once(size) * (kept + width * (kept != width)) for size, width in sizes)

    def _read_at_once(self, elements: int) -> int:
        """Elements of a weight's part that a rank reads at a time."""
        return min(self.part_of_one(elements), READ_AT_ONCE)

    def part_of_one(self, elements: int) -> int:
        """The most elements that a rank keeps of a weight."""
        return -(-elements // self.ranks)

    def sharded(self, block: int) -> list[Weight]:
        """The weights of a block, EMBED or TAIL that are not whole on every device."""
        whole = 0 <= block < self.resolved.whole_blocks
        return [w for w in self.holdings.unit(block) if w.trains or not whole]

    def frozen_bytes(self) -> int:
        """Bytes of all frozen weights, whole."""
        return self.holdings.frozen_bytes(self.frozen)

    def statistics_bytes(self) -> int:
        """Bytes of all quantisation statistics; they are never sharded."""
        return sum(count * w.statistics for unit, count in self.holdings.units() for w in unit)

    def _stored(self, weight: Weight) -> int:
        return weight.numel * self.frozen if weight.packed is None else weight.packed

    def bytes_now(self) -> int:
        """Total bytes of the memory model at this point."""
        return sum(self.resident.values()) + self.gathered + self.gradients + self.buffers


def _operations(model_type: str) -> int | None:
    """How many operations transformers (5.17 to 5.23) makes one weight out of several of a file with, at most; None if
    it reads each as it is."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = [len(getattr(one, "operations", ())) for one in get_checkpoint_conversion_mapping(model_type) or ()]
    return max(found, default=0) or None
