"""DeepSpeed ZeRO 1 and 2 (0.19.8; runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py), and what 3 shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from toolkit.strategies.memory.base import EMBED, TAIL, Compute, MemoryModel, Weight
from toolkit.strategies.zero_settings import Zero12Settings, ZeroSettings, whole_sums

_FLATTENED = 500_000_000
"""Elements that ``engine.buffered_allreduce_fallback`` reduces at once."""


class Piece(NamedTuple):
    """Of a gradient, or of several in a row, the elements that a rank keeps."""

    rank: int
    numel: int


class ZeroMemory(MemoryModel):
    """What the three stages share: master weights and the optimizer's state in the trained dtype, sharded
    (arXiv:1910.02054, section 5), on the device or on the host. ``part``: trained elements per rank, rounded up."""

    compute_as: ClassVar[Compute] = "cast"
    settings: ZeroSettings

    def account(self) -> None:
        self.settings = self.resolved.settings
        self.offload = self.resolved.recipe.strategy.offload
        part = -(-self.trains // self.ranks)
        state = part * self.trained + self.moments(part)  # master weights too
        if self.offload == "none":
            self.resident["optimizer"] = state
        else:
            self.host["optimizer"] = state
        self.part = part
        self.account_weights()

    def account_offload(self) -> None:
        """What stages 1 and 2 keep beside the state when it is on the host (stage_1_and_2.py, ``__init__`` and
        ``initialize_optimizer_states``): this rank's gradients, its weights in 16 bits on their way back, and room for
        the largest weight on either side."""
        if self.offload == "none":
            return
        room = self.largest_trained() * self.compute
        self.host["gradients"] = self.part * self.trained
        self.host["communication"] = self.part * self.compute + room
        self.resident["communication"] += room

    def saving(self) -> int:
        """Stage 3 reads a part of a tensor that is on the host through the device (stage3.py,
        ``get_local_fp32_param``)."""
        if self.settings.stage < 3 or self.offload == "none":
            return super().saving()
        return -(-self.largest_trained() // self.ranks) * self.trained

    def largest_master(self) -> int:
        """A rank's part of a whole parameter group is one tensor."""
        return -(-max(self.holdings.group_sizes().values(), default=0) // self.ranks)

    def largest_trained(self) -> int:
        """Elements of the largest weight that trains."""
        return max((w.numel for unit, _ in self.holdings.units() for w in unit if w.trains), default=0)

    def parts(self) -> Iterator[tuple[int, Weight, list[Piece]]]:
        """Of every trained weight its block, and what each rank has of it: groups are split each for itself, in the
        order of the model."""
        blocks = (EMBED, *range(len(self.holdings.order)), TAIL)
        for key in self.holdings.group_keys():
            own = [(b, w) for b in blocks for w in self.holdings.unit(b) if w.trains and (w.group, w.decays) == key]
            part = -(-sum(w.numel for _, w in own) // self.ranks)
            at = 0
            for block, weight in own:
                end = at + weight.numel
                ranks = range(at // part, (end - 1) // part + 1)
                yield block, weight, [Piece(r, min(end, (r + 1) * part) - max(at, r * part)) for r in ranks]
                at = end

    def copied(self) -> int:
        """Bytes of the gradients that the rank with the most of them copies out of the bucket: of every weight that its
        part begins or ends in, whole (stage_1_and_2.py, ``copy_grads_in_partition``)."""
        most = [0] * self.ranks
        for _, weight, pieces in self.parts():
            for piece in pieces:
                most[piece.rank] += weight.numel
        return max(most) * self.trained

    def temporary(self) -> int:
        """The optimizer updates a group's part of the flat weights at once."""
        sizes = self.holdings.group_sizes().values()
        most = max((self.optimizer.temporary((n,), False, self.trained, self.ranks) for n in sizes), default=0)
        return int(most) + self.group_copies()

    def norm_in_double(self) -> int:
        """Bytes of the largest weight's part in float64, in which its norm is computed (``get_norm_dtype``)."""
        return 8 * min(self.largest_trained(), self.part)

    def account_weights(self) -> None:
        """Add the weights to ``resident``: whole under stages 1 and 2, those that train in the compute dtype."""
        self.resident["parameters"] = self.trains * self.compute + self.frozen_bytes()


class Zero1Memory(ZeroMemory):
    """Under bf16 (BF16_Optimizer): a float32 gradient of every weight stays for the whole run, the 16-bit ones
    that autograd makes stay from their backward to the step, and the reduction copies what it reduces."""

    def account(self) -> None:
        super().account()
        self.account_offload()
        self.immediate = whole_sums(self.resolved)
        if self.immediate:
            self.resident["gradients"] = self.trains * self.trained

    def start(self, accumulating: bool) -> None:
        super().start(accumulating)
        if self.immediate:
            self.gradients = self.trains * self.compute if accumulating else 0

    def enter(self, block: int, backward: bool) -> int:
        if backward and not self.immediate:
            self.buffers = self.settings.reduce_bucket * self.trained
        return 0

    def gradient(self, weight: Weight, block: int) -> int:
        if not self.immediate:
            return super().gradient(weight, block)
        if not self.accumulating:
            self.gradients += weight.numel * self.compute
        return weight.numel * self.trained  # lp.grad.to(float32), added to the whole one

    def finish_backward(self) -> int:
        if not self.immediate:
            if self.mixed:
                return self.part * self.trained  # ``_build_compact_grad_partition_buffer``
            return self.copied() if self.offload == "none" else 0
        # torch's flatten of a single tensor is a view; of several a copy.
        return min(self.trains, _FLATTENED) * self.trained if self.holdings.groups() > 1 else 0


class Zero2Memory(ZeroMemory):
    """Gradients go into a bucket as they come; a full bucket is flattened by destination, cast to float32,
    reduced and added to this rank's float32 part. A gradient larger than the bucket is never copied into it, and the
    rank whose part it is in keeps it, whole, to the end of the step (stage_1_and_2.py, ``copy_grads_in_partition``).
    Walked through is the last rank: its part is what the backward comes to first, while activations are highest."""

    def account(self) -> None:
        super().account()
        self.account_offload()
        # ``_use_compact_grad_partition_buffer``
        self.compact = self.mixed
        self.pieces = {(block, weight.name): pieces for block, weight, pieces in self.parts()}
        self.of_others = {name: pieces for (_, name), pieces in self.pieces.items()}
        self.kept = self.part * self.trained
        if not self.compact:
            self.kept = self.copied() if self.offload == "none" else 0
            if self.offload != "none" and self.resolved.accumulation > 1:
                self.host["gradients"] += self.copied()  # ``accumulated_grads_in_cpu``

    def start(self, accumulating: bool) -> None:
        super().start(accumulating)
        self.gradients = self.kept if accumulating else 0
        # Made at the first reduction: once, or for every micro-batch and then added (``all_grad_tensors``).
        self.made = accumulating and self.compact
        self.bucket: list[Piece] = []
        self.filled = 0
        self.waiting = self.arriving = 0
        self.arrives_to_stay = False

    def enter(self, block: int, backward: bool) -> int:
        if backward and not self.buffers:
            copies = 2 if self.settings.overlap else 1
            self.buffers = copies * self.settings.reduce_bucket * self.compute
        return 0

    def gradient(self, weight: Weight, block: int) -> int:
        moment = 0
        # A gradient may come in another block than the weight's, or in one of a weight of none (T5's norm after the
        # encoder).
        pieces = self.pieces.get((block, weight.name)) or self.of_others[weight.name]
        if self.filled + weight.numel > self.settings.reduce_bucket:
            moment = self._reduced()
        self.bucket += pieces
        self.filled += weight.numel
        if weight.numel > self.settings.reduce_bucket:
            self.arriving = weight.numel * self.compute
            self.arrives_to_stay = self.compact and pieces[-1].rank == self.ranks - 1
        return moment

    def pass_on(self) -> None:
        self.gradients += self.arriving
        if not self.arrives_to_stay:
            self.waiting += self.arriving
        self.arriving = 0

    def finish_backward(self) -> int:
        moment = self._reduced()
        # Those that stayed are dropped afterwards (``_clear_param_grad_only``), and so are those that have been added.
        dropped, self.gradients = self.gradients - self.kept, self.kept
        return moment + dropped

    def _reduced(self) -> int:
        """Bytes of reducing what is there: what it reduces, where that is in no bucket, and the most that is reduced at
        once: flattened, where it is more than one piece (torch's flatten of a single one is a view), and cast where the
        sum is in another dtype."""
        if not self.bucket:
            return 0
        moments, summed = [0], self.trained if self.mixed else self.compute
        for pieces in self._at_once():
            numel = sum(piece.numel for piece in pieces)
            flattened = self.compute if len(pieces) > 1 else 0
            cast = summed if self.mixed else 0
            moments.append(numel * (flattened + cast))
        moment = max(moments)
        if not self.made and not self.compact:
            # Room for what the rank keeps is made afterwards (``copy_grads_in_partition``); ``compact``: before.
            moment = max(0, moment - self.kept)
        moment += self.waiting
        self.gradients += (0 if self.made else self.kept) - self.waiting
        self.made, self.waiting, self.filled, self.bucket = True, 0, 0, []
        return moment

    def _at_once(self) -> Iterator[list[Piece]]:
        """The bucket's pieces, those of a rank in a row as one unless the gradient of each is added up by itself, and
        divided where they are more than a bucket holds (``average_tensor``, ``allreduce_and_scatter``)."""
        settings = self.settings
        if isinstance(settings, Zero12Settings) and not settings.reduce_scatter:
            yield [Piece(0, self.filled)]
            return
        found: list[Piece] = []
        for piece in self.bucket:
            if found and found[-1].rank == piece.rank and not (self.compact and piece.rank == self.ranks - 1):
                piece = Piece(piece.rank, found.pop().numel + piece.numel)
            found.append(piece)
        together: list[Piece] = []
        numel = 0
        for piece in found:
            together.append(piece)
            numel += piece.numel
            if numel > settings.reduce_bucket:
                yield together
                together, numel = [], 0
        if together:
            yield together

    def step(self) -> int:
        return max(self.norm_in_double(), self.temporary())
