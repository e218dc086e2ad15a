"""``strategy.mesh.expert``: each rank trains its experts on the tokens of all ranks that share them.

DDP averages the gradients of everything else, FSDP2 shards it over all ranks. An expert's gradient is complete when the
ranks that have it have added up theirs: each is the sum over the samples of one group of ranks. Under FSDP2 these ranks
shard the expert.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit.errors import InputError
from toolkit.model.experts import expert_copies, expert_group
from toolkit.optim.adamw8bit import local
from toolkit.recipe.mesh import Mesh
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import NO_EXPERTS, Claim
from toolkit.strategies.engines.fsdp2 import Fsdp2Engine
from toolkit.strategies.engines.layers import DividedDdpEngine, DividedLayers
from toolkit.strategies.engines.pieces import Piece, Values, span
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.replicated import DdpEngine
from toolkit.upstream.torch import left_out_of_ddp
from toolkit.upstream.torch_fsdp import placed_on


class ReplicatedExperts(DividedLayers):
    """Experts are divided over groups of consecutive ranks; all other weights are whole on every rank of a stage."""

    def _groups(self, resolved: Resolved) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        return expert_group(resolved), expert_copies(resolved)

    def sum_experts(self) -> None:
        """Complete the gradients of the experts that this rank trains."""
        ranks = self.resolved.mesh.stage_size
        for name, parameter in self.parameters.items():
            if name not in self.divisions:
                continue
            if parameter.grad is None:  # no token has chosen it
                parameter.grad = torch.zeros_like(parameter)
            if ranks > self.resolved.mesh.expert:
                _over_copies(parameter.grad, self.state_group)
            parameter.grad.div_(ranks)  # as the others are averaged

    # ------------------------------------------------------------------ this rank's pieces

    def _share(self, name: str) -> Piece:
        if name not in self.divisions:
            return super()._share(name)
        mesh, rank = self.resolved.mesh, self.accelerator.process_index
        peers = mesh.expert_peers(rank)
        size = math.prod(self.parts[name])
        return span(size * peers.index(rank) // len(peers), size * (peers.index(rank) + 1) // len(peers))

    def _placed(self, name: str, values: Values) -> Values:
        return super()._placed(name, values) if name in self.divisions else values

    # ------------------------------------------------------------------ evidence

    def _expert_claims(self) -> list[Claim]:
        """Evidence that experts are divided: the ranks of a group have different ones, and those of other groups the
        same. Every rank calls it."""
        mesh, rank, world = self.resolved.mesh, self.accelerator.process_index, self.resolved.world_size
        own = dict(self.accelerator.unwrap_model(self.model).named_parameters())
        sums = torch.zeros(world, 2, dtype=torch.float64, device=self.device)
        for at, chosen in enumerate((True, False)):
            mine = [p for name, p in own.items() if (name in self.divisions) == chosen]
            sums[rank, at] = sum(p.detach().double().abs().sum().to(self.device) for p in mine)
        dist.all_reduce(sums)
        experts, rest = sums[:, 0].tolist(), sums[:, 1].tolist()
        alike = {rest[one] for one in mesh.state_peers(rank)}
        same = len({experts[one] for one in mesh.expert_peers(rank)}) == 1 == len(alike)
        return [
            _divided_claim(mesh, [experts[one] for one in mesh.expert_ranks(rank)], experts),
            Claim("experts-alike", "ranks agree on copies of experts and on all other weights", "yes",
                  "yes" if same else "no", same),
        ]  # fmt: skip


def _divided_claim(mesh: Mesh, own: Sequence[float], everywhere: Sequence[float]) -> Claim:
    """Evidence that ranks have different experts, by the sums of what each of a group has. A stage may have none, if
    another one has some (``everywhere``)."""
    different = len(set(own))
    none = not any(own) and any(everywhere)
    return Claim("experts-divided", "ranks with experts of their own", str(mesh.expert),
                 NO_EXPERTS if none else str(different), none or different == mesh.expert)  # fmt: skip


class ExpertsDdpEngine(ReplicatedExperts, DividedDdpEngine):
    """DDP averages the gradients of everything but experts."""

    def wrap(self, model: Any) -> Any:
        alike = [name for name, p in model.named_parameters() if p.requires_grad and name not in self.divisions]
        if not alike:
            raise InputError(
                f"{self.resolved.source}: strategy.mesh.expert: nothing but experts trains, and DDP needs a weight "
                "that all ranks have; train a norm or the routers, too"
            )
        left_out_of_ddp(model, self._unshared(model))
        return DdpEngine.wrap(self, model)

    def _unshared(self, model: Any) -> list[str]:
        """Weights whose gradients DDP leaves alone."""
        return list(self.divisions)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        super().backward(loss, last)
        if last:
            self.sum_experts()

    def evidence(self) -> list[Claim]:
        return [*DdpEngine.evidence(self), *self._expert_claims()]


def _over_copies(gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Of a group of ranks each has the sum over the samples that its own experts have seen."""
    dist.all_reduce(gradient, group=group)


class ExpertsFsdp2Engine(DividedLayers, Fsdp2Engine):
    """Experts are sharded over the ranks that have the same ones, everything else over all ranks."""

    def _groups(self, resolved: Resolved) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        return expert_group(resolved), expert_copies(resolved)

    def engage(self, prepared: Prepared) -> None:
        named = dict(prepared.model.named_parameters())
        experts = [named[name] for name in self.divisions if name in named]  # of this stage
        with _sharded_apart(experts, placed_on(self._expert_mesh())):
            super().engage(prepared)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # A rank whose experts no token has chosen takes part in the sum of their gradients.
                module.set_reduce_scatter_unused_params(True, recurse=False)

    def _expert_mesh(self) -> DeviceMesh:
        """The ranks that shard the same experts as this one, and copies of them. Every process calls it."""
        mesh = self.resolved.mesh
        sizes = (mesh.pipeline, mesh.replicate, mesh.expert_shards, mesh.expert)
        names = ("stages", "copies", "shards", "experts")
        whole = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return whole["copies", "shards"] if mesh.replicate > 1 else whole["shards"]

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter], decayed: frozenset[str]) -> torch.optim.Optimizer:
        """torch 2.13.0 updates the tensors of a group at once, for which they have to be of one device mesh."""
        optimizer = super()._make_optimizer(parameters, decayed)
        experts = {parameters[name] for name in self.divisions if name in parameters}
        apart = []
        for group in optimizer.param_groups:
            for inside in (True, False):
                own = [p for p in group["params"] if (p in experts) == inside]
                apart += [group | {"params": own}] if own else []
        optimizer.param_groups[:] = apart
        return optimizer

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        super().backward(loss, last)
        if last:
            self.average_experts()

    def average_experts(self) -> None:
        """FSDP2 has divided the gradients of experts by the number of ranks that have the same ones; those of all other
        weights by the number of all ranks."""
        for name, parameter in self.parameters.items():
            if name in self.divisions and parameter.grad is not None:
                local(parameter.grad).div_(self.resolved.mesh.expert)

    def _shards_of(self, name: str) -> int:
        mesh = self.resolved.mesh
        return mesh.expert_shards if name in self.divisions else mesh.shard

    def _axes(self, name: str, tensor: DTensor) -> tuple[int, int]:
        copies, parts = super()._axes(name, tensor)
        return copies, parts * self.resolved.mesh.expert if name in self.divisions else parts

    def evidence(self) -> list[Claim]:
        mesh, rank = self.resolved.mesh, self.accelerator.process_index
        sums = torch.zeros(self.resolved.world_size, dtype=torch.float64, device=self.device)
        own = dict(self.model.named_parameters())
        experts = [own[name] for name in self.divisions if name in own]
        sums[rank] = sum(local(expert).detach().double().abs().sum().to(self.device) for expert in experts)
        dist.all_reduce(sums)
        totals = [sum(sums[one].item() for one in mesh.expert_copies(other)) for other in mesh.expert_ranks(rank)]
        return [*super().evidence(), _divided_claim(mesh, totals, sums.tolist())]


@contextlib.contextmanager
def _sharded_apart(experts: list[nn.Parameter], place: Callable[[], Any]) -> Iterator[None]:
    """Inside, ``fully_shard`` shards ``experts`` where ``place`` says, over a mesh of their own. accelerate 1.15.0
    calls it, and passes no ``shard_placement_fn``."""
    own = {id(parameter) for parameter in experts}

    def placement(parameter: nn.Parameter) -> Any:
        return place() if id(parameter) in own else None

    right = fsdp.fully_shard
    fsdp.fully_shard = functools.partial(right, shard_placement_fn=placement)  # type: ignore[assignment]
    try:
        yield
    finally:
        fsdp.fully_shard = right
