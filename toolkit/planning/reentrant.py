"""Reentrant activation checkpointing in a trace: transformers' default before version 5.

As torch 2.4 to 2.13, utils/checkpoint.py, ``CheckpointFunction``: a block's input is kept; its backward computes the
whole forward again, and holds the input, detached, with its gradient until it returns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        ctx.run = run
        ctx.half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        detached = hidden.detach().requires_grad_(hidden.requires_grad)
        cast = contextlib.nullcontext() if ctx.half is None else torch.autocast("cpu", ctx.half)
        with torch.enable_grad(), cast:
            output = ctx.run(detached)
        torch.autograd.backward(output, grads[0])
        return None, detached.grad


@contextlib.contextmanager
def checkpointed(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Make each block's forward that of transformers under ``use_reentrant=True``. Embeddings that are frozen give
    outputs that ask for a gradient, as PEFT and the Trainer make them (``enable_input_require_grads``)."""
    for block in blocks:
        block.forward = functools.partial(_computed, block.forward)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]

    def asks(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if not output.requires_grad:
            output.requires_grad_(True)

    handle = embeddings.register_forward_hook(asks)
    try:
        yield
    finally:
        handle.remove()


def _computed(forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _Recomputed.apply(lambda given: forward(given, *args, **kwargs), hidden)
