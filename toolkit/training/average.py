"""Averages of the trained weights, in float32, each rank of what it updates.

`run.ema`: an exponential moving average, exported on request.

The average begins as the weights after update ``start``. After every ``every``-th update behind it becomes
``decay * average + (1 - decay) * weights`` (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992, with constant decay).

`optimizer.name: schedule-free`: the optimizer's own average, at which the model is evaluated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from toolkit.optim.schedule_free import averaged
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.schema import Ema
from toolkit.strategies.engines.base import Engine


class Average:
    """The average of an engine's weights, held where the weights are and sharded as they are.

    Whole averages are read and written by the engine's own methods for weights, inside ``swapped``.
    """

    def __init__(self, engine: Engine, settings: Ema) -> None:
        self.engine, self.settings = engine, settings
        self.tensors = [tensor.detach().clone() for tensor in engine.masters()]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the weights after this many updates, skipped steps not counted."""
        behind = updates - self.settings.start
        if behind <= 0:
            for average, weight in zip(self.tensors, self.engine.masters(), strict=True):
                average.copy_(weight)
        elif behind % self.settings.every == 0:
            get_ema_multi_avg_fn(self.settings.decay)(self.tensors, self.engine.masters(), None)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Context in which the engine's weights are the average, and the average is kept in their place. Every rank
        enters it; no forward may run inside: copies that a forward uses are not changed."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in zip(self.tensors, self.engine.masters(), strict=True):
            kept = weight.detach().clone()
            weight.copy_(average)
            average.copy_(kept)


@contextlib.contextmanager
def evaluation_weights(engine: Engine) -> Iterator[None]:
    """Context in which forwards compute with the weights that evaluations are at: the average, under an optimizer that
    keeps one. Every rank enters it, between steps; the weights of training are the same bits afterwards.

    Inside, each rank has a copy of the masters; between steps there are no gradients, which are as large.
    """
    optimizer = engine.resolved.recipe.optimizer
    if not optimizer_kind(optimizer.name).averages:
        yield
        return
    engine.release()
    kept = [master.detach().clone() for master in engine.masters()]
    with torch.no_grad():
        for master, z in zip(engine.masters(), engine.held("z"), strict=True):
            if z is not None:
                master.copy_(averaged(master, z, optimizer.betas[0]))
    engine.refresh()
    try:
        yield
    finally:
        engine.release()
        with torch.no_grad():
            for master, weight in zip(engine.masters(), kept, strict=True):
                master.copy_(weight)
        engine.refresh()
