"""``strategy.mesh.expert`` beside DDP: each rank trains its experts on the tokens of all ranks that share them.

DDP averages the gradients of everything else. An expert's gradient is complete when the ranks that have it have added
up theirs: each is the sum over the samples of one group of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from toolkit.errors import InputError
from toolkit.model.experts import expert_copies, expert_group
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.base import Claim
from toolkit.strategies.engines.layers import DividedDdpEngine
from toolkit.strategies.engines.pieces import Piece, Values, span
from toolkit.strategies.engines.replicated import DdpEngine


class ExpertsDdpEngine(DividedDdpEngine):
    """Experts are divided over groups of consecutive ranks; all other weights are whole on every rank."""

    def _groups(self, resolved: Resolved) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        return expert_group(resolved), expert_copies(resolved)

    def wrap(self, model: Any) -> Any:
        alike = [name for name, p in model.named_parameters() if p.requires_grad and name not in self.divisions]
        if not alike:
            raise InputError(
                f"{self.resolved.source}: strategy.mesh.expert: nothing but experts trains, and DDP needs a weight "
                "that all ranks have; train a norm or the routers, too"
            )
        model._ddp_params_and_buffers_to_ignore = self._unshared(model)
        return DdpEngine.wrap(self, model)

    def _unshared(self, model: Any) -> list[str]:
        """Weights whose gradients DDP leaves alone."""
        return list(self.divisions)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        super().backward(loss, last)
        if last:
            self.sum_experts()

    def sum_experts(self) -> None:
        """Complete the gradients of the experts that this rank trains."""
        copies = self.resolved.world_size // self.resolved.mesh.expert
        for name, parameter in self.parameters.items():
            if name not in self.divisions:
                continue
            if parameter.grad is None:  # no token has chosen it
                parameter.grad = torch.zeros_like(parameter)
            if copies > 1:
                _over_copies(parameter.grad, self.state_group)
            parameter.grad.div_(self.resolved.world_size)  # as DDP divides the others

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

    def evidence(self) -> list[Claim]:
        return [*DdpEngine.evidence(self), *self._expert_claims()]

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
        different = len({experts[one] for one in mesh.expert_ranks(rank)})
        same = len({experts[one] for one in mesh.expert_peers(rank)}) == 1 == len(set(rest))
        return [
            Claim("experts-divided", "ranks with experts of their own", str(mesh.expert), str(different),
                  different == mesh.expert),
            Claim("experts-alike", "ranks agree on copies of experts and on all other weights", "yes",
                  "yes" if same else "no", same),
        ]  # fmt: skip


def _over_copies(gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Of a group of ranks each has the sum over the samples that its own experts have seen."""
    dist.all_reduce(gradient, group=group)
