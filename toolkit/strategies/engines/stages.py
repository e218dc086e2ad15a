"""Stages of a pipeline: each rank trains its blocks; ranks with the same blocks average their gradients.

This class gives and takes weights of the whole model: the stage that has one sends it to the others, or takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.model.tensor import group_of, state_group
from toolkit.optim.adamw8bit import local
from toolkit.strategies.engines.base import Engine, OptimizerState
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.fsdp2 import Fsdp2Engine
from toolkit.strategies.engines.layers import square
from toolkit.strategies.engines.link import Link, Pipeline
from toolkit.strategies.engines.pieces import Owned, Saved, Values
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.replicated import SingleEngine
from toolkit.strategies.memory.replicated import BUCKET

if TYPE_CHECKING:
    from accelerate import Accelerator


class Staged(Engine):
    """What an engine does otherwise where ranks have some of the model's blocks; comes before it among the base
    classes."""

    _factors: dict[int, float] | None

    def __init__(self, prepared: Prepared, accelerator: Accelerator) -> None:
        assert prepared.stage is not None
        self.stage = prepared.stage
        self._lr, self._factors = 0.0, None
        """The step's learning rate, and by group its multiple of it."""
        resolved = prepared.resolved
        self.link = Link(resolved, accelerator.device)
        self.pipeline = Pipeline(self.stage, self.link)
        self.ends_group = group_of(resolved, lambda rank: _ends(resolved.mesh.stage_ranks(rank), rank), "ends")
        super().__init__(prepared, accelerator)
        self.stage.own = {}  # what a strategy shards, it has replaced
        self.stage.connect(self.link.receive_hidden, self.link.send_hidden)
        self.shapes = {name: tuple(shape) for name, shape in self.stage.trained.items()}
        self.dtypes = self.stage.dtypes

    # ------------------------------------------------------------------ the step

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        with self.accumulating(last):
            super().backward(loss, last)

    def unscale(self) -> None:
        self._sum_shared()
        super().unscale()

    def _sum_shared(self) -> None:
        """Of a weight that the embedding and the head share, each of the two stages has a part of the gradient."""
        for name in self.stage.shared:
            if (parameter := self.parameters.get(name)) is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _over_ends(local(parameter.grad), self.ends_group)

    def clip(self, max_norm: float) -> torch.Tensor:
        gradients = [p.grad for name, p in self.parameters.items() if p.grad is not None and self._owns(name)]
        squares = square(gradients, self.device)  # of those that two stages have, in the first
        _over_stages(squares, self.link.group)
        norm = squares.sqrt()
        self.scale_down(max_norm, norm)
        return norm

    def set_lr(self, lr: float) -> None:
        self._lr = lr
        super().set_lr(lr)

    def group_rates(self) -> list[float]:
        """Of every group of the model; those that no weight of this stage is in as their stages set them."""
        if self._factors is None:
            own = {group["group"]: group["lr_factor"] for group in self.optimizer.param_groups
                   if group.get("group") is not None}  # fmt: skip
            found: list[dict[int, float]] = [{} for _ in range(dist.get_world_size(self.link.group))]
            dist.all_gather_object(found, own, group=self.link.group)
            self._factors = {number: factor for one in found for number, factor in one.items()}
        return [self._lr * self._factors[number] for number in sorted(self._factors)]

    # ------------------------------------------------------------------ whole tensors

    def full_weight(self, name: str, main_only: bool = False) -> torch.Tensor:
        own = super().full_weight(name) if name in self.parameters else None
        return self._from_owner(name, own, self.shapes[name], self.dtypes[name], main_only)

    def full_gradient(self, name: str) -> torch.Tensor | None:
        own = super().full_gradient(name) if name in self.parameters else None
        (there,) = self._of_owner(name, [own is not None])
        return self._from_owner(name, own, self.shapes[name], self.dtypes[name], False) if there else None

    def full_state(self, name: str, scales: bool = False, main_only: bool = False) -> OptimizerState | None:
        own = super().full_state(name, scales) if name in self.parameters else None
        about = None if own is None else (own.step, {k: (tuple(m.shape), m.dtype) for k, m in own.moments.items()})
        (given,) = self._of_owner(name, [about])
        if given is None:
            return None
        step, forms = given
        moments = {} if own is None else own.moments
        return OptimizerState(step, {key: self._from_owner(name, moments.get(key), shape, dtype, main_only)
                                     for key, (shape, dtype) in forms.items()})  # fmt: skip

    def load(self, name: str, weight: torch.Tensor, state: OptimizerState | None) -> None:
        if name in self.parameters:
            super().load(name, weight, state)

    def own_weight(self, name: str) -> Values:
        return super().own_weight(name) if self._owns(name) else []

    def own_gradient(self, name: str) -> Values:
        return super().own_gradient(name) if self._owns(name) else []

    def pieces(self, name: str) -> Owned:
        return super().pieces(name) if self._owns(name) else Owned([], {}, {}, None)

    def load_pieces(self, name: str, saved: Saved) -> None:
        if name in self.parameters:
            super().load_pieces(name, saved)

    def _owns(self, name: str) -> bool:
        """Whether this stage writes a weight: of those that have it, the first."""
        return self.stage.owners[name] == self.stage.index

    def _of_owner(self, name: str, values: list[Any]) -> list[Any]:
        """What the stage that has a weight says of it."""
        dist.broadcast_object_list(values, self.link.ranks[self.stage.owners[name]], self.link.group, self.device)
        return values

    def _from_owner(
        self, name: str, own: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, main_only: bool
    ) -> torch.Tensor:
        """A tensor of the stage that has it, on the CPU; or without values where this rank has no use for them."""
        if own is None:
            own = torch.empty(tuple(shape), dtype=dtype)
        if not main_only or 0 in self.link.ranks:
            own = own.to(self.device).contiguous()
            dist.broadcast(own, self.link.ranks[self.stage.owners[name]], group=self.link.group)
        return own.cpu() if self._reads(main_only) else torch.empty_like(own, device="meta")

    # ------------------------------------------------------------------ evidence

    def _stage_claims(self) -> list[Claim]:
        """Evidence that stages have different blocks, that together they have the model, and that weights which two of
        them share are equal. Every rank calls it."""
        mesh = self.resolved.mesh
        here = [str(at) for at in self.stage.blocks], sorted(dict(self.model.named_parameters())), self._sums()
        found: list[Any] = [None] * mesh.pipeline
        dist.all_gather_object(found, here, self.link.group)
        blocks = [at for numbers, _, _ in found for at in numbers]
        names = [name for _, own, _ in found for name in own]
        listed = " | ".join(f"{numbers[0]}-{numbers[-1]}" for numbers, _, _ in found)
        right = [str(at) for at in range(len(blocks))]
        whole = len(self.stage.owners)
        # The head of a tied model has a name of its own where there is no embedding.
        once = len(names) - len(self.stage.shared)
        sums = [own for _, _, own in found if own]
        claims = [
            Claim("stages", "blocks of each stage", f"{mesh.pipeline} stages of consecutive blocks", listed,
                  len(found) > 1 and blocks == right),
            Claim("stage-weights", "weights in exactly one stage", str(whole), str(once),
                  once == whole and len(set(names)) == len(names)),
        ]  # fmt: skip
        if self.stage.shared:
            same = len(sums) == 2 and sums[0] == sums[1]
            claims.append(Claim("stage-shared", "first and last stage agree on weights that they share", "yes",
                                "yes" if same else "no", same))  # fmt: skip
        return claims

    def _sums(self) -> list[int]:
        """Of each weight that two stages share the sum of its bytes, where this is one of them."""
        own = {self.stage.names.get(name, name): p for name, p in self.model.named_parameters()}
        return [int(local(own[name]).detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
                for name in self.stage.shared if name in own]  # fmt: skip


def _ends(ranks: list[int], rank: int) -> list[int]:
    """The first and the last rank of a pipeline; of a rank between them itself."""
    return [ranks[0], ranks[-1]] if rank in (ranks[0], ranks[-1]) else [rank]


def _over_ends(gradient: torch.Tensor, group: Any) -> None:
    """Sum a gradient over the first and the last stage."""
    dist.all_reduce(gradient, group=group)


def _over_stages(squares: torch.Tensor, group: Any) -> None:
    """Each stage has the squares of its own weights' gradients."""
    dist.all_reduce(squares, group=group)


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one dtype and about 25 MiB each, in order."""
    found: list[list[torch.Tensor]] = []
    size = 0
    for gradient in gradients:
        if not found or size >= BUCKET or found[-1][0].dtype != gradient.dtype:
            found.append([])
            size = 0
        found[-1].append(gradient)
        size += gradient.nbytes
    return found


class StagedDdpEngine(Staged, SingleEngine):
    """Gradients are averaged over the ranks that have the same blocks, once per step. DDP itself begins to sum them in
    the backward that follows the last forward, which with stages is an earlier micro-batch's."""

    def unscale(self) -> None:
        # Before the two stages of a shared weight add up: a collective of more than two ranks adds in an order that
        # depends on where a tensor is in its bucket, and both have to have the same gradient.
        self._average()
        super().unscale()

    def _average(self) -> None:
        copies = self.resolved.mesh.replicate
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if copies == 1:
            return
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(copies)
            dist.all_reduce(flat, group=state_group(self.resolved))
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def wrap(self, model: nn.Module) -> nn.Module:
        # As DDP does: the first rank's weights are those of all copies.
        first, group = self.resolved.mesh.state_peers(dist.get_rank())[0], state_group(self.resolved)
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), first, group=group)
        return model

    def load_pieces(self, name: str, saved: Saved) -> None:
        if name in self.parameters:
            Engine.load_pieces(self, name, saved)

    def evidence(self) -> list[Claim]:
        parts = [((self.resolved.mesh.replicate, 1), p.data) for p in self.parameters.values()]
        return [*super().evidence(), *self._mesh_claims(parts), *self._stage_claims()]


class StagedFsdp2Engine(Staged, Fsdp2Engine):
    """The ranks of a stage shard its blocks, or copy what is sharded: accelerate is given their mesh."""

    def evidence(self) -> list[Claim]:
        return [*super().evidence(), *self._stage_claims()]
