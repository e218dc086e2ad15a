"""The micro-batches of a window through the stages of a pipeline: one forward, one backward (1F1B).

A stage (toolkit/recipe/mesh.py) runs ahead by as many forwards as there are stages after it, then takes turns: it keeps
the activations of that many micro-batches and one more, however many a window has. Backwards come in the order of the
micro-batches on every stage, so that gradients are added up as without stages.

``torch.distributed.pipelining`` (2.13.0) cuts one batch into micro-batches of one shape and calls the model in a loop
of its own. Here each micro-batch has its own length, mask, seed and tokens, and a window may be short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from toolkit.data.collate import MicroBatch
from toolkit.recipe.mesh import one_forward_one_backward
from toolkit.strategies.engines.link import Pipeline


def run_window(
    pipeline: Pipeline,
    micros: Iterator[MicroBatch],
    count: int,
    forward: Callable[[MicroBatch], torch.Tensor],
    backward: Callable[[torch.Tensor, MicroBatch], None],
) -> None:
    """Accumulate the gradient of a window of ``count`` micro-batches. ``forward`` gives the loss of one, of which only
    the last stage has one; ``backward`` takes it, or what stands for it."""
    stage, link = pipeline.stage, pipeline.link
    pipeline.actions = []
    waiting: dict[int, tuple[MicroBatch, torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = {}
    for what, number in one_forward_one_backward(stage.index, stage.count, count):
        pipeline.actions.append((what, number))
        if what == "forward":
            micro = next(micros)
            loss = forward(micro)
            waiting[number] = (micro, loss, *stage.taken())
            continue
        micro, loss, received, handed = waiting.pop(number)
        if handed is not None:
            loss = _Handed.apply(handed, link.receive_gradient(handed))
        backward(loss, micro)
        if received is not None:
            assert received.grad is not None
            link.send_gradient(received.grad)


class _Handed(torch.autograd.Function):
    """In place of the loss of a stage that has none: its backward gives hidden states the gradient that the next stage
    has sent."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
