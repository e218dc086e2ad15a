"""Another correct backward: the gradient of a tensor that several modules read, summed in another order.

ZeRO-3 puts a node of its own on the inputs of every module (DeepSpeed 0.19.8, parameter_offload.py). The parts of a
hidden state's gradient are then summed within each module first, where autograd alone sums all of them one after
another. In 16 bits the sums differ by a rounding in most elements, while losses are equal bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def summed_by_module(model: nn.Module) -> Iterator[None]:
    """Inside, every module of ``model`` reads its inputs through a node of its own."""

    def through_a_node(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in args)

    handles = [module.register_forward_pre_hook(through_a_node) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
