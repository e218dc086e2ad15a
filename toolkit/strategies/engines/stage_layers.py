"""``strategy.mesh.pipeline`` beside ``tensor``: the ranks of a stage divide the layers of its blocks.

To a stage the parts of its layers are weights, which this rank has or another stage has; what is told and taken is of
whole weights, which the ranks of the stage that has them join first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.strategies.engines.base import Claim, Prepared
from toolkit.strategies.engines.fsdp2 import Fsdp2Engine
from toolkit.strategies.engines.layers import DividedLayers
from toolkit.strategies.engines.replicated import SingleEngine
from toolkit.strategies.engines.stages import Staged, StagedDdpEngine, StagedFsdp2Engine

if TYPE_CHECKING:
    from accelerate import Accelerator


class StagedLayers(Staged, DividedLayers):
    """What an engine does otherwise where stages have divided layers; stands before it among the base classes."""

    def __init__(self, prepared: Prepared, accelerator: Accelerator) -> None:
        super().__init__(prepared, accelerator)
        self.shapes = {name: self._whole_shape(name, shape) for name, shape in self.shapes.items()}
        # From here on of this stage's weights alone. A tied head has another name in its stage, and is never divided.
        here = {name for name, _ in self.model.named_parameters()}
        self.divisions = {name: division for name, division in self.divisions.items() if name in here}

    def _own_square(self) -> torch.Tensor:
        return self.squares(self._counted())

    def evidence(self) -> list[Claim]:
        return [*super().evidence(), *self._layer_claims()]


class StagedLayersDdpEngine(StagedLayers, StagedDdpEngine, SingleEngine):
    """Gradients are averaged over the ranks that hold the same parts of the same blocks, once per step."""


class StagedLayersFsdp2Engine(StagedLayers, StagedFsdp2Engine, Fsdp2Engine):
    """The ranks that hold the same parts of the same blocks shard them, or copy what is sharded."""
