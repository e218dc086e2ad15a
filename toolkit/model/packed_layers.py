"""Frozen linear layers whose weights are packed in fewer bits, of whatever format, and unpacked for each product.

The packed weight is an ordinary parameter, so every strategy shards it like any other; its statistics are whole on
every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class PackedLayer(nn.Linear):
    """A frozen linear layer with a packed weight.

    Input (..., in_features) to output (..., out_features), in autocast's dtype if it is on, else in the input's.
    ``weight``: bits, whatever its dtype's name. ``statistics``: what its format unpacks them with; ``statistics.dtype``
    is the dtype that is unpacked.
    """

    def __init__(self, linear: nn.Linear, weight: torch.Tensor, statistics: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.statistics = nn.Parameter(weight, requires_grad=False), statistics
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Autocast on meta tensors is acted out for the CPU's, see toolkit/planning.
        kind = "cpu" if input.is_meta else input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        product: torch.Tensor = _Product.apply(input, self)
        return product

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``, shape (out_features, in_features), as it computes. The packed parameter must be
        whole just now, as it is within forward and backward."""
        raise NotImplementedError

    def empty_statistics(self, dtype: torch.dtype) -> Any:
        """Statistics of the same sizes, to unpack ``dtype``, without their values, made where tensors are made now: for
        tracing."""
        raise NotImplementedError

    def statistics_bytes(self) -> int:
        """Bytes that dequantisation needs in addition to the packed weight."""
        raise NotImplementedError

    def plain(self) -> nn.Linear:
        """A linear layer with the dequantised weight, frozen, in the base's dtype, and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dequantised(self.statistics.dtype), requires_grad=False)
        linear.bias = self.bias
        return linear


class _Product(torch.autograd.Function):
    """Unpacks again in the backward. It holds the layer and no tensor of it: bitsandbytes' own product keeps a view of
    the packed weight, so that what ZeRO-3 has gathered would stay gathered until the backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: PackedLayer) -> torch.Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(input.dtype)
        return functional.linear(input, layer.dequantised(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad.matmul(ctx.layer.dequantised(grad.dtype)), None


def packed_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """The packed layers of a model, wrapped or not, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLayer)}


def packed_weights(model: nn.Module) -> set[int]:
    """Ids of the parameters that are bits, whatever their dtype's name: no cast may touch them."""
    return {id(layer.weight) for layer in packed_layers(model).values()}


def unpack_layers(model: nn.Module) -> None:
    """Replace the packed layers, in place, by linear layers with dequantised weights, see ``PackedLayer.plain``."""
    for name, layer in packed_layers(model).items():
        model.set_submodule(name, layer.plain())


def weight_count(model: nn.Module) -> int:
    """Number of parameters of a model, each packed weight counted as one."""
    packed = packed_layers(model).values()
    total = sum(p.numel() for p in model.parameters()) - sum(layer.weight.numel() for layer in packed)
    return total + sum(layer.in_features * layer.out_features for layer in packed)
