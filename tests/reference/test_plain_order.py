"""The plain loop in a candidate's order of sums: nothing else of the computation changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.reference.order import Order, summed_by_module


class Seen(nn.Module):
    """Notes the strides of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strides = x.stride()
        return x * 1


def test_nodes_keep_the_strides_of_a_single_image() -> None:
    """ConvNeXt's blocks end in a permuted tensor. For one image a view has the strides (8, 1, 64, 8), and the next
    convolution computes in another layout, with another rounding, than it does under ZeRO-3."""
    model = nn.Sequential(Seen(), Seen())
    x = torch.randn(1, 8, 8, 8).permute(0, 3, 1, 2).requires_grad_() * 1
    with summed_by_module(model, Order(by_module=True)):
        model(x).sum().backward()
    assert [one.strides for one in model] == [(512, 1, 64, 8)] * 2


class Products(TorchDispatchMode):
    """Notes the shapes of what is multiplied, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[list[tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append([tuple(one.shape) for one in args])
        return func(*args, **kwargs or {})


def gradients(linear: Callable[..., torch.Tensor], bias: bool, seed: int) -> list[torch.Tensor]:
    """Of input, weight and bias. The weight is the transpose of what is stored, as adapters compute it (VB-LoRA)."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 37, 4, generator=draw).requires_grad_()
    stored = torch.randn(4, 16, generator=draw).requires_grad_()
    shift = torch.randn(16, generator=draw).requires_grad_() if bias else None
    linear(x, stored.t(), shift).pow(2).sum().backward()
    return [t.grad for t in (x, stored, shift) if t is not None and t.grad is not None]


@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_are_those_of_zero_3(bias: bool) -> None:
    """DeepSpeed replaces torch's linear layer under ZeRO-3, also for layers without a bias."""
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    for seed in range(20):
        right = gradients(zero3_linear_wrap, bias, seed)
        with summed_by_module(nn.Identity(), Order(by_module=True)):
            found = gradients(lambda *args: functional.linear(*args), bias, seed)
        assert all(map(torch.equal, found, right))
    # Some CPUs' kernels round both orders alike (those with AMX), so what is multiplied tells them apart.
    with Products() as as_zero_3:
        gradients(zero3_linear_wrap, bias, 0)
    with Products() as plain:
        gradients(functional.linear, bias, 0)
    with summed_by_module(nn.Identity(), Order(by_module=True)), Products() as ours:
        gradients(lambda *args: functional.linear(*args), bias, 0)
    backward = [sorted(one.shapes[1:]) for one in (as_zero_3, ours, plain)]
    assert backward[0] == backward[1] != backward[2], "autograd's own order is another one"
