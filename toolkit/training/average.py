"""The average that an optimizer keeps of the weights, at which the model is evaluated (`optimizer.name:
schedule-free`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from toolkit.optim.schedule_free import averaged
from toolkit.optimizers import optimizer_kind
from toolkit.strategies.engines.base import Engine


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
