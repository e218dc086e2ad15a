"""``strategy.mesh.expert``, under FSDP2: each rank trains its experts on the tokens of all ranks that share them.

FSDP2 shards an expert over the ranks that have it, and everything else over all ranks. An expert's gradient is complete
when the ranks that have it have added up theirs: each is the sum over the samples of one group of ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit.model.experts import expert_group
from toolkit.optim.adamw8bit import local
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.fsdp2 import Fsdp2Engine
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.layouts.divided import Divided
from toolkit.upstream.torch_fsdp import placed_on


class Experts(Divided, Fsdp2Engine):
    """Experts are sharded over the ranks that have the same ones, everything else over all ranks."""

    def _group(self, resolved: Resolved) -> dist.ProcessGroup:
        return expert_group(resolved)

    def engage(self, prepared: Prepared) -> None:
        named = dict(prepared.model.named_parameters())
        experts = [named[name] for name in self.divisions]
        with _sharded_apart(experts, placed_on(self._expert_mesh())):
            super().engage(prepared)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # A rank whose experts no token has chosen takes part in the sum of their gradients.
                module.set_reduce_scatter_unused_params(True, recurse=False)

    def _expert_mesh(self) -> DeviceMesh:
        """The ranks that shard the same experts as this one, and copies of them. Every process calls it."""
        mesh = self.resolved.mesh
        sizes = (mesh.replicate, mesh.expert_shards, mesh.expert)
        names = ("copies", "shards", "experts")
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
        experts = [own[name] for name in self.divisions]
        sums[rank] = sum(local(expert).detach().double().abs().sum().to(self.device) for expert in experts)
        dist.all_reduce(sums)
        totals = [sum(sums[one].item() for one in mesh.expert_copies(other)) for other in mesh.expert_ranks(rank)]
        different = len(set(totals))
        return [
            *super().evidence(),
            Claim("experts-divided", "ranks with experts of their own", str(mesh.expert), str(different),
                  different == mesh.expert),
        ]  # fmt: skip


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
