"""Stages of a pipeline: each rank trains its blocks; ranks with the same blocks average their gradients.

This class gives and takes weights of the whole model: the stage that has one sends it to the others, or takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.model.tensor import group_of
from toolkit.optim.adamw8bit import local
from toolkit.strategies.engines.base import Engine, OptimizerState
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.link import Link, Pipeline
from toolkit.strategies.engines.pieces import Owned, Saved, Values
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.layouts.divided import square

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

    def complete_gradients(self) -> None:
        super().complete_gradients()
        self._sum_shared()

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

    def evidence(self) -> list[Claim]:
        return [*super().evidence(), *self._stage_claims()]

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
