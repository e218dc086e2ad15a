"""The plain loop in a candidate's order of sums: nothing else of the computation changes."""

import torch
from torch import nn

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
