"""FSDP1 (flat parameters) and FSDP2 (per parameter), torch 2.13 wrapped by accelerate 1.15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from toolkit.strategies.fsdp import FsdpSettings
from toolkit.strategies.memory.base import EMBED, TAIL, Compute, MemoryModel, Weight


class _FsdpMemory(MemoryModel):
    """Everything in parts; a unit's weights are gathered for its forward and again for its backward, its gradients
    reduced together when the last of them is there."""

    compute_as: ClassVar[Compute] = "cast"
    settings: FsdpSettings

    def account(self) -> None:
        self.settings = self.resolved.settings
        sharded = self.holdings.without_frozen(self.resolved.whole_blocks)
        shares = sharded.shares(self.resolved)
        self.parts = sum(-(-own.elements(True) * self.trained // ranks) for own, ranks in shares)
        parameters = self.parts + sum(-(-own.frozen_bytes(self.frozen) // ranks) for own, ranks in shares)
        parameters += self.frozen_bytes() - sharded.frozen_bytes(self.frozen)
        moments = self.moments(self.own_elements())
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
        self.whole_gradients = accumulating and self.settings.last
        """The last micro-batch of a step finds whole gradients of the others (``strategy.sync: last``)."""
        if not self.whole_gradients:
            self.gradients = self.parts if accumulating and not self.settings.offload else 0
        self.all_gathered = self.whole_gradients and not self.settings.reshard
        if self.all_gathered:
            self.gathered = sum(self.whole(block) for block in (EMBED, TAIL, *range(len(self.holdings.order))))
        self.done = 0
        self.waiting: dict[int, list[int]] = {}
        self.freed: set[int] = set()
        self.reducing = self.kept = 0
        self.tail_began = False

    def whole(self, block: int) -> int:
        """Bytes of a unit's gathered weights."""
        return self._bytes(block, self.compute)

    def _bytes(self, block: int, trained: int) -> int:
        return sum(w.numel * trained if w.trains else self._stored(w) for w in self.sharded(block))

    def stays(self, block: int) -> bool:
        """Whether a unit's weights stay gathered from its forward to its backward."""
        return not self.settings.reshard

    def enter(self, block: int, backward: bool) -> int:
        self.buffers = self.ahead(block, backward) + self.reducing
        if not (backward and self.stays(block)) and not self.all_gathered:
            self.gathered += self.whole(block)
        return 0

    def leave(self, block: int, backward: bool) -> None:
        if (backward and block not in self.freed) or (not backward and not self.stays(block)):
            self.gathered -= self.whole(block)

    def ahead(self, block: int, backward: bool) -> int:
        """Bytes gathered for the unit that comes next. In the forward only on a GPU, where it overlaps with the compute
        of ``block``; a CPU has no stream for it."""
        if block < 0 or self.all_gathered:
            return 0
        return self.before(block) if backward else self.whole(block) * self.overlap

    def before(self, block: int) -> int:
        """Bytes that the backward of ``block`` begins to gather: the unit before it in the forward. On any device
        (BACKWARD_PRE, ``_pre_backward_hook`` in _runtime_utils.py; ``pre_backward`` in _fsdp_param_group.py)."""
        unit = self.unit_before(block)
        return 0 if unit is None or self.stays(unit) or self.all_gathered else self.whole(unit)

    def unit_before(self, block: int) -> int | None:
        """The unit before ``block`` in the forward whose weights can be gathered ahead; None if there is none."""
        if block == TAIL:
            return len(self.holdings.order) - 1
        return block - 1 if block > 0 else None

    def gradient(self, weight: Weight, block: int) -> int:
        if block == TAIL and not self.tail_began:  # with the gradient of the logits, when those of the loss are gone
            self.tail_began = True
            self.buffers += self.before(TAIL)
        unit = self.unit_of(weight, block)
        trained = [w.numel for w in self.weights(unit) if w.trains]
        waiting = self.waiting.setdefault(unit, list(trained))
        if weight.numel in waiting:
            waiting.remove(weight.numel)
        new = 0 if self.adds_in_place() else self.compute
        if waiting:
            self.gradients += weight.numel * new
            return 0
        elements = sum(trained)
        self.gradients -= (elements - weight.numel) * new
        part = sum(-(-own * self.trained // ranks) for own, ranks in self.reduced(unit))
        if self.whole_gradients:
            self.done += elements * self.trained - part  # until the sum over the ranks is there
        elif not self.accumulating and not self.settings.offload:
            self.gradients, part = self.gradients + part, 0  # what is reduced is this device's gradient
        elif self.accumulating and self.keeps_sums():
            self.gradients += part
            self.kept, part = self.kept + part, 0
        if unit == block:  # before they are reduced
            self.leave(block, True)
            self.freed.add(block)
        return self.reduction(unit, weight.numel, elements, part)

    def reduced(self, unit: int) -> list[tuple[int, int]]:
        """Elements whose gradients are reduced with ``unit``, those of one collective after another: experts over the
        ranks that have the same ones, all else over all; and how many ranks that is."""
        mesh = self.resolved.mesh
        trained = [w for w in self.weights(unit) if w.trains]
        experts = sum(w.numel for w in trained if w.ranks > 1) if mesh.expert > 1 else 0
        return [(experts, mesh.expert_shards), (sum(w.numel for w in trained) - experts, self.ranks)]

    def pass_on(self) -> None:
        self.gradients -= self.done
        self.done = 0

    def keeps_sums(self) -> bool:
        """Whether what is added to the gradients of earlier micro-batches stays until the backward ends."""
        return False

    def finish_backward(self) -> int:
        self.gradients -= self.kept
        self.kept = 0
        return super().finish_backward()

    def adds_in_place(self) -> bool:
        """Whether autograd adds a gradient to that of the earlier micro-batches, so that it takes no memory of its own
        beside the activations."""
        return False

    def unit_of(self, weight: Weight, block: int) -> int:
        """The unit whose gradients ``weight``'s is reduced with."""
        if block >= 0:
            return block
        # Position tables, say, are among the tail's weights and finish with the embeddings.
        return EMBED if weight in self.holdings.embed else TAIL

    def weights(self, unit: int) -> Sequence[Weight]:
        """The weights whose gradients are reduced together as ``unit``."""
        return self.holdings.unit(unit)

    def reduction(self, unit: int, last: int, elements: int, part: int) -> int:
        """Bytes that reducing the gradients of ``unit`` takes temporarily: ``elements`` in all, ``last`` of them still
        counted with the activations, ``part`` bytes of them this device's."""
        raise NotImplementedError

    def step(self) -> int:
        # The last reduction is complete, and its buffers are free.
        self.buffers = self.gathered = 0
        return super().step()

    def copied_by_gloo(self, size: int) -> int:
        """Bytes of the copy that gloo, on a CPU, makes of an input of ``size`` bytes (ProcessGroupGloo.cpp,
        ``_reduce_scatter_base``: an all-reduce of a clone)."""
        return 0 if self.overlap else size


class Fsdp2Memory(_FsdpMemory):
    """All-gather into one buffer, copied out into whole parameters (_fsdp_collectives.py). accelerate
    (fsdp_utils.fsdp2_prepare_model) makes the embeddings a unit, and last norm and head one that stays gathered;
    tied embeddings are in the latter. In the forward, what a unit was gathered into is freed when the next one's
    weights are copied out, and the last one's when the model's forward ends (_fsdp_param_group.py,
    ``wait_for_unshard``; _fsdp_state.py, ``_post_forward``): the fused loss is computed before that."""

    def loading(self) -> int:
        # Shards are made without values and filled one after another; a whole model is moved unit by unit.
        return self.resident["parameters"] if self.by_part() else super().loading()

    def stays(self, block: int) -> bool:
        return block == TAIL or (block == EMBED and self.holdings.tied) or super().stays(block)

    def start(self, accumulating: bool) -> None:
        super().start(accumulating)
        self.copied_out = 0

    def enter(self, block: int, backward: bool) -> int:
        moment = super().enter(block, backward)
        if backward:
            self.copied_out = 0
        elif not (block == TAIL and self.holdings.tied) and not self.all_gathered and self.ranks > 1:
            # What the one before was gathered into is there until this one has been copied out.
            moment, self.copied_out = self.copied_out, self.whole(block)
        if block != TAIL or self.resolved.recipe.loss == "fused":
            self.buffers += self.copied_out
        elif not backward:
            moment += self.copied_out  # gone before the loss
        return moment

    def ahead(self, block: int, backward: bool) -> int:
        # A rank that shards alone copies weights where it uses them (_fsdp_param_group.py, ``wait_for_unshard``).
        return super().ahead(block, backward) if self.ranks > 1 else 0

    def before(self, block: int) -> int:
        return super().before(block) if self.ranks > 1 else 0

    def keeps_sums(self) -> bool:
        # _fsdp_param_group.py, ``AllReduceState``: what copies have summed, until ``finalize_backward``.
        return self.resolved.mesh.hybrid and not self.settings.offload

    def adds_in_place(self) -> bool:
        # _fsdp_param.py, ``to_accumulated_grad_if_needed``: else they are added up in another tensor, of reduce_dtype.
        return self.whole_gradients and self.compute == self.trained

    def unit_before(self, block: int) -> int | None:
        # None where no gradient reaches it (engines/fsdp2.py, ``_prefetch_what_has_a_backward``).
        unit = EMBED if block == 0 else super().unit_before(block)
        if unit is None or any(w.trains for w in self.holdings.embed):
            return unit
        return unit if any(w.trains for one in range(unit + 1) for w in self.holdings.unit(one)) else None

    def reduction(self, unit: int, last: int, elements: int, part: int) -> int:
        # _fsdp_param_group.py, ``post_backward``: the weights go, then the unit before's input, kept until now
        # (comm_ctx.reduce_scatter_states); then gradients are copied into this one's, and go.
        before, self.reducing = self.reducing, elements * self.trained
        self.buffers += self.reducing - before
        copying = 0 if self.adds_in_place() else (elements - last) * self.compute
        # ``foreach_reduce`` (torch 2.13) has the last of them in a loop's variable until it returns.
        held = self.weights(unit)[-1].numel
        largest = max((own for own, ranks in self.reduced(unit) if ranks > 1), default=0)
        sending = part + self.copied_by_gloo(largest * self.trained)
        if not self.whole_gradients:
            return max(copying, sending + (held - last) * self.compute)
        # Those that are added up are whole until they are copied; what autograd made last has been added to them, but
        # in another dtype it is held as well.
        sending += held * self.trained - self.reducing - (last * self.compute if self.adds_in_place() else 0)
        return max(copying, sending)


class Fsdp1Memory(_FsdpMemory):
    """A flat parameter per block, and one of all that is in no block, which is the root's and stays gathered
    for the whole pass (_runtime_utils.py, ``_post_forward_reshard``) and is reduced at its end."""

    @property
    def leaks_inputs(self) -> bool:
        # torch 2.4 to 2.13, _runtime_utils.py, ``_register_post_backward_reshard_only_hook``: a frozen unit hangs a
        # hook on its input that holds the input's own node; reentrant checkpointing makes that input a leaf, which the
        # node holds, with its gradient, until ``_finalize_params`` takes the hook away.
        return bool(self.freezes)

    def loading(self) -> int:
        # A unit's weights are on the device, and put together into the flat parameter that is then sharded
        # (_flat_param.py, ``flatten_tensors``). Loaded by part they are views of one that is as large as the largest.
        unit = max(sum(map(self._loaded, self.weights(block))) for block in self._units())
        stays = self.resident["parameters"]
        if self.settings.offload:
            stays += -(-unit // self.ranks)  # a unit is sharded before its shard goes to the host
        if not self.by_part():
            return stays + 2 * unit
        # On a CPU nothing writes to what is lent: it takes no memory.
        lent = max(self._loaded(w) for block in self._units() for w in self.weights(block))
        return stays + unit + lent * self.overlap

    def part_of_one(self, elements: int) -> int:
        # Parts are those of a flat parameter: one can have all of a weight.
        unit = max(sum(w.numel for w in self.weights(block)) for block in self._units())
        return min(elements, -(-unit // self.ranks))

    def updating(self, weight: Weight) -> float:
        # Optimizers here update element by element: those that need whole matrices are refused.
        whole = self.optimizer.temporary(weight.shape, weight.matrix, self.trained, 1)
        return whole * self.part_of_one(weight.numel) / weight.numel

    def _units(self) -> Sequence[int]:
        return (EMBED, *range(len(self.holdings.order)))

    def _loaded(self, weight: Weight) -> int:
        return weight.numel * self.trained if weight.trains else self._stored(weight)

    def whole(self, block: int) -> int:
        if block == EMBED:
            return super().whole(EMBED) + super().whole(TAIL)
        return 0 if block == TAIL else super().whole(block)

    def stays(self, block: int) -> bool:
        return block == EMBED or super().stays(block)

    def unit_of(self, weight: Weight, block: int) -> int:
        return block if block >= 0 else EMBED

    def weights(self, unit: int) -> Sequence[Weight]:
        return [*self.holdings.embed, *self.holdings.tail] if unit < 0 else self.holdings.unit(unit)

    def enter(self, block: int, backward: bool) -> int:
        moment = super().enter(block, backward)
        unit = self.unit_before(block) if backward else block
        if unit is None or self.all_gathered or (backward and self.stays(unit)):
            return moment
        return moment + self.cast(unit) + (self.not_yet_freed(block) if backward and not self.apart else 0)

    @property
    def apart(self) -> bool:
        """Each layer that trains beside frozen weights is a unit by itself."""
        return bool(self.freezes) and self.wraps_layers

    def ahead(self, block: int, backward: bool) -> int:
        # A block's last unit in the forward is a layer of the adapter: the block before comes later, see below.
        return 0 if backward and self.apart else super().ahead(block, backward)

    def gradient(self, weight: Weight, block: int) -> int:
        if not self.apart:
            return super().gradient(weight, block)
        # The layer that was first in the forward comes after the block before it.
        part = -(-weight.numel * self.trained // self.ranks)
        if self.whole_gradients:
            self.done += weight.numel * self.trained - part
        elif not self.accumulating and not self.settings.offload:
            self.gradients, part = self.gradients + part, 0
        left = self.waiting.setdefault(block, [w.numel for w in self.weights(block) if w.trains])
        if weight.numel in left:
            left.remove(weight.numel)
        if len(left) == 1:
            self.buffers = self.before(block)
        return self.reduction(block, weight.numel, weight.numel, part)

    def not_yet_freed(self, block: int) -> int:
        """Bytes of frozen weights of the block after ``block``, which go when the gradient of its input is there; that
        is also when the unit before ``block`` is asked for, by a hook that was registered earlier
        (_runtime_utils.py, ``_register_post_backward_reshard_only_hook``)."""
        after = block + 1
        if block < 0 or after >= len(self.holdings.order):
            return 0
        return sum(self._stored(w) for w in self.sharded(after) if not w.trains)

    def cast(self, unit: int) -> int:
        """Bytes of this device's part of a unit in the compute dtype, until it is gathered (_flat_param.py,
        ``_use_low_precision_shard``)."""
        if self.compute == self.trained:
            return 0
        elements = sum(w.numel for w in self.weights(unit) if w.trains)
        return -(-elements * self.compute // self.ranks)

    def reduction(self, unit: int, last: int, elements: int, part: int) -> int:
        # The weights' gradients are put together while all is gathered still (``SplitWithSizesBackward`` of the flat
        # weight). Then ``_post_backward_hook``: what was put together is there until its cast has been reduced.
        apart = (elements - last) * self.compute
        cast = elements * self.trained if self.compute != self.trained else 0
        joining = elements * self.compute + (self.whole(unit) if unit in self.freed else 0)
        return apart + max(joining, cast + part + self.copied_by_gloo(elements * self.trained))
