"""The exponential moving average of the trained weights.

It begins as the weights after update ``start``. After every ``every``-th update behind it becomes
``decay * average + (1 - decay) * weights`` (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992, with constant decay).
"""

from __future__ import annotations

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from toolkit.recipe.schema import Ema
from toolkit.strategies.engines.base import Engine
from toolkit.training.shadow import ShadowWeights


class Average(ShadowWeights):
    """The average of an engine's weights."""

    def __init__(self, engine: Engine, settings: Ema) -> None:
        super().__init__(engine)
        self.settings = settings

    @torch.no_grad()
    def update(self, updates: int) -> None:
        behind = updates - self.settings.start
        if behind <= 0:
            for average, weight in zip(self.tensors, self.engine.masters(), strict=True):
                average.copy_(weight)
        elif behind % self.settings.every == 0:
            get_ema_multi_avg_fn(self.settings.decay)(self.tensors, self.engine.masters(), None)


keep = Average
