"""Each rank trains its part of divided layers, and the strategy shards the parts: ``strategy.mesh.tensor``, and axes
of other files whose ranks lie as its do."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from toolkit.model.tensor import layer_group
from toolkit.optim.adamw8bit import local
from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.layouts.divided import Divided


class Layers(Divided):
    """Each rank's parts are sharded over the ranks that have the same ones: accelerate's mesh has an axis beside."""

    def _group(self, resolved: Resolved) -> dist.ProcessGroup:
        return layer_group(resolved)

    def engage(self, prepared: Prepared) -> None:
        # accelerate 1.15.0 warns that weights which are no DTensors are not divided by torch.
        log = logging.getLogger("accelerate.accelerator")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            super().engage(prepared)
        finally:
            log.setLevel(level)

    def evidence(self) -> list[Claim]:
        return [*super().evidence(), *self._layer_claims()]

    def _layer_claims(self) -> list[Claim]:
        """Evidence that layers are divided: the ranks have different parts of the divided weights, and the same of all
        others. Every rank calls it."""
        mesh = self.resolved.mesh
        names = list(self.divisions)
        own = dict(self.model.named_parameters())
        divided = [own[name] for name in names]
        rest = [p for name, p in own.items() if name not in self.divisions]
        sums = torch.zeros(mesh.columns, 2, dtype=torch.float64, device=self.device)
        for at, tensors in enumerate((divided, rest)):
            sums[mesh.column(self.accelerator.process_index), at] = sum(
                local(p).detach().double().abs().sum().to(self.device) for p in tensors
            )
        dist.all_reduce(sums, group=self.layer_group)
        different = len(set(sums[:, 0].tolist()))
        same = len(set(sums[:, 1].tolist())) == 1
        return [
            Claim("layers-divided", "ranks with a part of their own of divided layers", str(mesh.columns),
                  str(different), bool(names) and different == mesh.columns),
            Claim("layers-alike", "ranks agree on weights that are not divided", "yes", "yes" if same else "no", same),
        ]  # fmt: skip
