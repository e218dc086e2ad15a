"""DeepSpeed ZeRO 3 (0.19.8; runtime/zero/stage3.py, partition_parameters.py, partitioned_param_coordinator.py)."""

from __future__ import annotations

from toolkit.strategies.memory.base import EMBED, TAIL, Weight
from toolkit.strategies.memory.zero import ZeroMemory
from toolkit.strategies.zero_settings import Zero3Settings

_REUSE = 1_000_000_000
"""stage3_max_reuse_distance, as toolkit/strategies/zero.py writes it."""


class Zero3Memory(ZeroMemory):
    """Weights too are parts; whole ones are gathered layer by layer, and kept if soon used again."""

    compute_as = "deepspeed-linear"
    settings: Zero3Settings

    def account_weights(self) -> None:
        settings = self.settings
        small = settings.persistence_threshold
        parts = whole = 0
        sharded = self.holdings.without_frozen(self.resolved.whole_blocks)
        for unit, count in sharded.units():
            parts += count * sum(-(-self._elements(w) // self.ranks) * self._size(w) for w in unit)
            whole += count * sum(self._elements(w) * self._size(w) for w in unit if self._elements(w) < small)
        whole += self.frozen_bytes() - sharded.frozen_bytes(self.frozen)
        parts += self._second_copies()
        if self.offload == "all":
            self.host["parameters"] = parts
            self.resident["parameters"] = whole
        else:
            self.resident["parameters"] = parts + whole
        gradients = self.part * self.trained
        if self.offload == "none":
            self.resident["gradients"] = gradients
        else:
            # A flat buffer, and what the optimizer reads (stage3.py, ``initialize_optimizer_states``).
            self.host["gradients"] = 2 * gradients
        self.resident["communication"] = settings.reduce_bucket * self.trained
        self._kept = self._kept_after_forward()

    def _second_copies(self) -> int:
        """hpZ: this rank's part of the group's second copy of every weight (partition_parameters.py,
        ``_partition_param_sec``): of frozen ones for the whole run, of those that train from their first use after a
        step to the next one; small ones that train are whole, and copied once, before the first step."""
        group, small = self.settings.hpz, self.settings.persistence_threshold
        if group == 1:
            return 0
        kept = [
            (w, count)
            for unit, count in self.holdings.units()
            for w in unit
            if not w.trains or self._elements(w) >= small
        ]
        return sum(
            count * -(-self._elements(w) // self.ranks) * (self.ranks // group) * self._size(w) for w, count in kept
        )

    def loading(self) -> int:
        # engines/zero.py has each parameter moved whole, then split (partition_parameters.py, ``_zero_init_param``).
        largest = max(self._elements(w) * self._size(w) for unit, _ in self.holdings.units() for w in unit)
        return self.resident["parameters"] + largest

    def adapter_loading(self) -> int:
        # Beside its float32 values those that DeepSpeed rounds (engines/zero.py, ``_lossy_copies``).
        return super().adapter_loading() * (2 if self.mixed else 1)

    def _size(self, weight: Weight) -> int:
        return self.compute if weight.trains else self.frozen

    def _elements(self, weight: Weight) -> int:
        """As DeepSpeed counts: packed weights count in elements of the frozen dtype."""
        return weight.numel if weight.packed is None else weight.packed // self.frozen

    def _large(self, block: int, tied: bool = False) -> list[Weight]:
        """Weights that are gathered for a block; tied embeddings, used in two places, apart."""
        if block == EMBED and self.holdings.tied and not tied:
            return []
        return [w for w in self.sharded(block) if self._elements(w) >= self.settings.persistence_threshold]

    def _gathered(self, block: int) -> int:
        """Bytes gathered while in ``block``: whole if it stays; else a layer at a time, with the next one coming."""
        weights = self._large(block)
        whole = sum(self._elements(w) * self._size(w) for w in weights)
        if block in self._kept or not weights:
            return whole
        ahead = self.settings.prefetch_bucket * self.compute
        return min(whole, 2 * max(self._elements(w) * self._size(w) for w in weights) + ahead)

    def _kept_after_forward(self) -> set[int]:
        """What stays gathered from forward to backward: weights used again before 1e9 elements have gone by
        (stage3_max_reuse_distance), once forth and once back (partitioned_param_coordinator.py,
        ``__params_to_release``). Frozen embeddings have no backward to be used in."""
        kept: set[int] = set()
        distance = 0
        for block in (TAIL, *range(len(self.holdings.order) - 1, -1, -1), EMBED):
            if distance >= _REUSE or (block == EMBED and not any(w.trains for w in self.holdings.embed)):
                break
            kept.add(block)
            distance += 2 * sum(self._elements(w) for w in self._large(block))
        return kept

    def gathers(self) -> tuple[int, int, int]:
        """Bytes that a micro-batch gathers and in how many units, and bytes of small weights, which are whole on every
        rank: those that train are gathered after each step."""
        micro = units = 0
        for block in (EMBED, *range(len(self.holdings.order)), TAIL):
            whole = sum(self._elements(w) * self._size(w) for w in self._large(block))
            backward = block != EMBED or any(w.trains for w in self.holdings.embed)
            times = 2 if backward and block not in self._kept else 1
            micro += times * whole
            units += times * bool(whole)
        if self.holdings.tied:
            shared = sum(self._elements(w) * self._size(w) for w in self._large(EMBED, True))
            trained = any(w.trains for w in self.holdings.embed)
            # First and last of all, and by the head in the middle, between which they may stay.
            times = 1 if self._between() < _REUSE else 2 + trained
            micro += times * shared
            units += times * bool(shared)
        small = self.settings.persistence_threshold
        least = sum(count * w.numel * self.compute for unit, count in self.holdings.units()
                    for w in unit if w.trains and self._elements(w) < small)  # fmt: skip
        return micro, units, least

    def _between(self) -> int:
        """Elements of all blocks, which are used between tied embeddings' uses."""
        return sum(w.numel for kind in self.holdings.order for w in self.holdings.kinds[kind])

    def start(self, accumulating: bool) -> None:
        super().start(accumulating)
        self.gradients = 0
        self.waiting = self.together = 0
        self.embeddings = False

    def enter(self, block: int, backward: bool) -> int:
        if not (backward and block in self._kept):
            self.gathered += self._gathered(block)
        if self.holdings.tied and block < 0:
            self._shared(True)
        self.fetched = 0 if backward else self._fetching(block)
        return self.fetched

    def _fetching(self, block: int) -> int:
        """What a forward gathers while it is in ``block``, beside the block's own: the next weights, as many as a
        prefetch takes, in the gather's buffer and copied out of it, while the prefetch after them is gathered
        (partition_parameters.py, ``AllGatherCoalescedHandle.wait``; partitioned_param_coordinator.py,
        ``fetch_sub_module``)."""
        if block == TAIL or (block not in self._kept and block != EMBED):
            return 0  # what goes back to parts at once is counted with it: ``_gathered``
        blocks = (EMBED, *range(len(self.holdings.order)), TAIL)
        left = sum(self._elements(w) * self._size(w) for b in blocks[blocks.index(block) :] for w in self._large(b))
        own = sum(self._elements(w) * self._size(w) for w in self._large(block))
        ahead = self.settings.prefetch_bucket * self.compute
        now = min(max(ahead, own), left)
        return now - own + now + min(ahead, left - now)

    def leave(self, block: int, backward: bool) -> None:
        if backward or block not in self._kept:
            self.gathered -= self._gathered(block)
        if self.holdings.tied and block < 0:
            # Tied embeddings are used first and last of all, and by the head in the middle.
            again = not backward or (block == TAIL and any(w.trains for w in self.holdings.embed))
            if not (again and (self._between() < _REUSE or (block == TAIL and not backward))):
                self._shared(False)

    def _shared(self, there: bool) -> None:
        """Gather or free the embeddings that are the head too."""
        if there != self.embeddings:
            self.embeddings = there
            size = sum(w.numel * self._size(w) for w in self._large(EMBED, tied=True))
            self.gathered += size if there else -size

    def gradient(self, weight: Weight, block: int) -> int:
        # A gradient waits for the next one that does not fit beside it in the bucket: in it, or, where it is larger
        # than the bucket, whole.
        moment = 0
        if self.waiting and self.waiting + weight.numel > self.settings.reduce_bucket:
            moment = self._reduced()
        self.waiting += weight.numel
        self.together += 1
        if weight.numel > self.settings.reduce_bucket:
            self.gradients += weight.numel * self.compute
        return moment

    def finish_backward(self) -> int:
        return self._reduced()

    def _reduced(self) -> int:
        """Bytes of reducing what waits (coalesced_collectives.py, ``reduce_scatter_coalesced``): gradients of several
        weights are copied together; one that was too large for the bucket is cast. Gloo reduces a copy."""
        size = self.waiting * self.trained
        large = self.waiting > self.settings.reduce_bucket
        copies = int(self.together > 1 or (large and self.mixed)) + int(not self.overlap)
        self.gradients = 0
        self.waiting = self.together = 0
        return copies * size

    def step(self) -> int:
        return max(self.norm_in_double(), self.temporary())
