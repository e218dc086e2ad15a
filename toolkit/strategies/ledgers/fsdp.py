"""FSDP1 (flat parameters) and FSDP2 (per parameter), torch 2.13 wrapped by accelerate 1.15."""

from __future__ import annotations

from typing import ClassVar

from toolkit.strategies.fsdp import FsdpSettings
from toolkit.strategies.ledgers.base import EMBED, TAIL, Compute, Ledger, Weight


class _FsdpLedger(Ledger):
    """Everything in parts; a unit's weights are gathered for its forward and again for its backward, its gradients
    reduced together when the last of them is there."""

    compute_as: ClassVar[Compute] = "cast"
    settings: FsdpSettings

    def account(self) -> None:
        self.settings = self.resolved.settings
        self.parts = -(-self.trains * self.trained // self.ranks)
        parameters = self.parts + -(-self.frozen_bytes() // self.ranks)
        moments = self.moments(-(-self.trains // self.ranks))
        if self.settings.offload:
            self.host |= {"parameters": parameters, "optimizer": moments, "gradients": self.parts}
        else:
            self.resident["parameters"], self.resident["optimizer"] = parameters, moments

    def loading(self) -> int:
        # Each unit is moved whole, then split (_init_utils.py, ``_move_module_to_device``; _fsdp_init.py,
        # ``_move_states_to_device``).
        blocks = (EMBED, TAIL, *range(len(self.holdings.order)))
        largest = max(self._bytes(block, self.trained) for block in blocks)
        return self.resident["parameters"] + largest

    def start(self, accumulating: bool) -> None:
        super().start(accumulating)
        self.gradients = self.parts if accumulating and not self.settings.offload else 0
        self.waiting: dict[int, list[int]] = {}
        self.reducing = 0

    def whole(self, block: int) -> int:
        """Bytes of a unit's gathered weights."""
        return self._bytes(block, self.compute)

    def _bytes(self, block: int, trained: int) -> int:
        return sum(w.numel * trained if w.trains else self._stored(w) for w in self.holdings.unit(block))

    def stays(self, block: int) -> bool:
        """Whether a unit's weights stay gathered from its forward to its backward."""
        return not self.settings.reshard

    def enter(self, block: int, backward: bool) -> int:
        if backward and self.stays(block):
            return 0
        size = self.whole(block)
        self.gathered += size
        self.buffers = self.ahead(block, backward) + self.reducing
        return self.gathering(size)

    def leave(self, block: int, backward: bool) -> None:
        if backward or not self.stays(block):
            self.gathered -= self.whole(block)

    def gathering(self, size: int) -> int:
        """What gathering ``size`` bytes takes for a moment beside them."""
        return 0

    def ahead(self, block: int, backward: bool) -> int:
        """On a GPU the next unit is gathered while this one computes; there is no stream to do so on a CPU."""
        return self.whole(block) if self.overlap and block >= 0 else 0

    def gradient(self, weight: Weight, block: int) -> int:
        if block < 0:  # position tables, say, stand with the tail's weights and finish with the embeddings
            block = EMBED if weight in self.holdings.embed else TAIL
        waiting = self.waiting.setdefault(block, [w.numel for w in self.holdings.unit(block) if w.trains])
        if weight.numel in waiting:
            waiting.remove(weight.numel)
        elements = sum(w.numel for w in self.holdings.unit(block) if w.trains)
        if waiting:
            self.gradients += weight.numel * self.compute
            return 0
        self.gradients -= (elements - weight.numel) * self.compute
        part = -(-elements * self.trained // self.ranks)
        if not self.accumulating and not self.settings.offload:
            self.gradients += part
        self.reduced(elements)
        return (elements - weight.numel) * self.compute + elements * self.trained + part

    def reduced(self, elements: int) -> None:
        """A unit's gradients have been handed to the reduction."""


class Fsdp2Ledger(_FsdpLedger):
    """All-gather into one buffer, copied out into whole parameters (_fsdp_collectives.py). accelerate
    (fsdp_utils.fsdp2_prepare_model) makes the embeddings a unit, and last norm and head one that stays gathered;
    tied embeddings are in the latter. In the forward, what a unit was gathered into is freed when the next one's
    weights are copied out, and the last one's when the model's forward ends (_fsdp_param_group.py,
    ``wait_for_unshard``; _fsdp_state.py, ``_post_forward``): the fused loss is computed before that."""

    def stays(self, block: int) -> bool:
        return block == TAIL or (block == EMBED and self.holdings.tied) or super().stays(block)

    def start(self, accumulating: bool) -> None:
        super().start(accumulating)
        self.copied_out = 0

    def enter(self, block: int, backward: bool) -> int:
        moment = super().enter(block, backward)
        if backward:
            self.copied_out = 0
        elif not (block == TAIL and self.holdings.tied):
            # What the one before was gathered into is there until this one's copy begins.
            moment, self.copied_out = max(self.copied_out - self.whole(block), 0), self.whole(block)
        fused = self.resolved.recipe.loss == "fused"
        self.buffers += self.copied_out if block != TAIL or fused else 0
        return moment

    def ahead(self, block: int, backward: bool) -> int:
        # In the backward the next unit's gathering is begun on any device (_fsdp_param_group.py, pre_backward).
        return self.whole(block) if block >= 0 and (self.overlap or backward) else 0

    def reduced(self, elements: int) -> None:
        # The reduction's input is kept until the next unit's (comm_ctx.reduce_scatter_state).
        self.reducing = elements * self.trained


class Fsdp1Ledger(_FsdpLedger):
    """A flat parameter per block, and one of all that stands in no block, which is the root's and stays gathered
    for the whole pass (_runtime_utils.py, ``_post_forward_reshard``)."""

    def whole(self, block: int) -> int:
        if block == EMBED:
            return super().whole(EMBED) + super().whole(TAIL)
        return 0 if block == TAIL else super().whole(block)

    def stays(self, block: int) -> bool:
        return block == EMBED or super().stays(block)
