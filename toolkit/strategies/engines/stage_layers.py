"""``strategy.mesh.pipeline`` beside ``tensor`` or ``expert``: the ranks of a stage divide the layers of its blocks, or
their experts.

To a stage the parts of its weights are weights, which this rank has or another stage has. This class
gives and takes whole weights, which the ranks of the stage that has them join first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from toolkit.strategies.engines.claims import Claim
from toolkit.strategies.engines.experts import ExpertsFsdp2Engine, ReplicatedExperts
from toolkit.strategies.engines.fsdp2 import Fsdp2Engine
from toolkit.strategies.engines.layers import DividedLayers
from toolkit.strategies.engines.prepared import Prepared
from toolkit.strategies.engines.replicated import SingleEngine
from toolkit.strategies.engines.stages import Staged, StagedDdpEngine, StagedFsdp2Engine

if TYPE_CHECKING:
    from accelerate import Accelerator


class StagedParts(Staged, DividedLayers):
    """What an engine does otherwise where the ranks of a stage divide weights; comes before it among the base
    classes."""

    def __init__(self, prepared: Prepared, accelerator: Accelerator) -> None:
        super().__init__(prepared, accelerator)
        self.shapes = {name: self._whole_shape(name, shape) for name, shape in self.shapes.items()}
        # From here on of this stage's weights alone. A tied head has another name in its stage, and is never divided.
        here = {name for name, _ in self.model.named_parameters()}
        self.divisions = {name: division for name, division in self.divisions.items() if name in here}

    def _own_square(self) -> torch.Tensor:
        return self.squares(self._counted())


class StagedLayers(StagedParts):
    """... where what they divide is layers."""

    def evidence(self) -> list[Claim]:
        return [*super().evidence(), *self._layer_claims()]


class StagedLayersDdpEngine(StagedLayers, StagedDdpEngine, SingleEngine):
    """Gradients are averaged over the ranks that hold the same parts of the same blocks, once per step."""


class StagedLayersFsdp2Engine(StagedLayers, StagedFsdp2Engine, Fsdp2Engine):
    """The ranks that hold the same parts of the same blocks shard them, or copy what is sharded."""


class StagedExpertsDdpEngine(StagedParts, StagedDdpEngine, ReplicatedExperts, SingleEngine):
    """All ranks of a stage average the gradients of everything but experts, those with the same experts sum theirs;
    both once per step."""

    def _average(self) -> None:
        super()._average()
        self.sum_experts()

    def _alike(self, name: str) -> bool:
        return name not in self.divisions

    def wrap(self, model: nn.Module) -> nn.Module:
        first = self.resolved.mesh.expert_peers(dist.get_rank())[0]
        for name, parameter in model.named_parameters():
            if name in self.divisions:
                dist.broadcast(parameter.detach(), first, group=self.state_group)
        return super().wrap(model)

    def evidence(self) -> list[Claim]:
        return [*SingleEngine.evidence(self), *self._stage_claims(), *self._expert_claims()]


class StagedExpertsFsdp2Engine(StagedParts, StagedFsdp2Engine, ExpertsFsdp2Engine):
    """The ranks of a stage shard everything but experts, those with the same experts shard theirs."""
