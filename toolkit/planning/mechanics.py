"""Measures a strategy's own overhead: a few tokens through the recipe's model, so that compute is negligible.

The rest of such a step is the strategy's work on weights and gradients: gathering, reducing, copying to and from its
buffers, hooks, and waiting for other devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.planning.hardware import Device
from toolkit.planning.time import Rates, Wire, step_seconds
from toolkit.recipe.resolve import Resolved
from toolkit.recipe.schema import Recipe
from toolkit.strategies import resolve, strategies, strategy_of
from toolkit.strategies.memory.base import Holdings

TOKENS = 8
STEPS = 6


@dataclass(frozen=True)
class Step:
    """Seconds of one rank, medians: of a micro-batch that is not the last of its step, of the last one, of the rest
    of the step (unscale, clip, update)."""

    first: float
    last: float
    update: float

    @property
    def whole(self) -> float:
        return self.first + self.last + self.update


def variants(together: Resolved, asked: Resolved) -> dict[str, Recipe]:
    """Of every strategy that takes the recipe, the recipe under it with ``TOKENS`` tokens twice a step.

    ``together``: the recipe as it is calibrated; ``asked``: whose strategy keeps its own settings.
    """
    found = {}
    for name, strategy in strategies().items():
        if not strategy.traits.distributed:
            continue
        values = together.recipe.model_dump(exclude_unset=True)
        values["strategy"] = {"name": name}
        if name == asked.recipe.strategy.name:
            values["strategy"] = asked.recipe.strategy.model_dump(exclude_unset=True) | {"offload": "none"}
        values["batch"] = {"micro_size": 1, "accumulation": 2}
        recipe = Recipe.model_validate(values)
        try:
            resolve(recipe, together.source, device=together.device)
        except InputError:
            continue  # refused: the search says so with the reason
        found[name] = recipe
    return found


def step_of(recipe: dict[str, Any], device: str, length: int = TOKENS, exchange: bool = True) -> Step:
    """Every rank calls it, with the recipe of two micro-batches a step; rows of ``length`` random tokens.

    ``exchange`` False: nothing is sent, every device computes and updates for itself.
    """
    import torch

    from toolkit.data.collate import bounds_of
    from toolkit.model.head_loss import multiplied_by
    from toolkit.model.loss_terms import LossTerms
    from toolkit.planning.measure import random_batch
    from toolkit.strategies.engines.connect import make_accelerator
    from toolkit.training.loss import loss_sum
    from toolkit.training.preparation import prepare_model

    resolved = resolve(Recipe.model_validate(recipe), device=device)
    linear = torch.nn.functional.linear
    try:
        accelerator = make_accelerator(resolved)
        engine = strategy_of(resolved).engine_for(resolved)(prepare_model(resolved, pad_token_id=0), accelerator)
        tensors = random_batch(engine.config, resolved, length, engine.device)
        bounds, terms = bounds_of(tensors), LossTerms.of(resolved.recipe)
        weight = torch.full((), 1.0 / (resolved.micro_size * length), device=engine.device)

        def micro(last: bool) -> None:
            with engine.accumulating(last and exchange):
                with engine.autocast(), multiplied_by(weight):
                    task = resolved.recipe.model.task
                    loss = loss_sum(engine.model, engine.config, tensors, task, terms, bounds=bounds)
                engine.backward(loss * weight, last and exchange)

        def update() -> None:
            engine.unscale()
            engine.step(0.0)

        # The first makes moments and buffers.
        turns = [
            (seconds(lambda: micro(False), device), seconds(lambda: micro(True), device), seconds(update, device))
            for _ in range(STEPS)
        ][1:]
    finally:
        torch.nn.functional.linear = linear  # DeepSpeed 0.19.8 leaves its own there: see measure.py
    return Step(*(statistics.median(column) for column in zip(*turns, strict=True)))


def own_seconds(
    resolved: Resolved, holdings: Holdings, step: Step, alone: Step, device: Device, rates: Rates
) -> tuple[float, float]:
    """What ``step`` took per micro-batch and per step beyond ``alone`` (nothing sent) and what the rates explain."""
    traffic = strategy_of(resolved).traffic(resolved, holdings)
    wire = Wire(resolved, device, rates)
    per_micro = step.first - alone.first
    known = step_seconds(resolved, holdings, [], device, rates)
    assert known is not None
    at_end = step.whole - alone.first - alone.last - 2 * per_micro - known.optimizer
    return (
        per_micro - sum(wire.seconds(*sent) for sent in traffic.per_micro),
        at_end - sum(wire.seconds(*sent) for sent in traffic.at_end),
    )


def seconds(work: Callable[[], Any], device: str) -> float:
    """Of ``work``, until the device has done it."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun
