"""What a product in float8 is, from the definition (arXiv:2209.05433, table 1): the linear layers of the plain loop
under ``fp8: true``. Every value is rounded to the float8 numbers by arithmetic; ordinary tensors are multiplied."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.recipe.resolve import Resolved
from toolkit.reference.option import PlainOption


@dataclass(frozen=True)
class Counted:
    """What the plain loop has rounded: layers, products of the forward and of the backward; and the products, at least,
    that recomputing whole blocks runs again."""

    layers: int
    forward: int
    backward: int
    recomputed: int


@dataclass(frozen=True)
class PlainProducts(PlainOption):
    """The linear layers of the blocks multiply rounded values."""

    def change(self, model: nn.Module, resolved: Resolved) -> None:
        round_products(model, resolved)

    def without(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return unrounded(model)

    def shaken(self, model: nn.Module, seed: int) -> contextlib.AbstractContextManager[None]:
        return shaken(model, seed)

    def reset(self, model: nn.Module) -> None:
        for layer in rounded_layers(model).values():
            layer.products = layer.backward_products = 0

    def count(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Counted:
        layers = rounded_layers(model).values()
        return Counted(
            len(layers),
            sum(one.products for one in layers),
            sum(one.backward_products for one in layers),
            sum(_recomputed(block) for block in blocks),
        )


def plain(settings: bool) -> PlainProducts:
    return PlainProducts()


def _recomputed(block: nn.Module) -> int:
    """Products of a block that its recomputation runs again. It ends with the last tensor that the backward needs: in
    the first block of a model whose attention and MLP are side by side the MLP has no gradient where it does not
    train, and is not run again."""
    layers = rounded_layers(block).values()
    last = max((one.ran for one in layers if one.backward_products), default=-1)
    return sum(one.products for one in layers if one.ran <= last)


@dataclass(frozen=True)
class Format:
    """Bits of the mantissa, exponent of the smallest normal number, largest number."""

    mantissa: int
    smallest: int
    largest: float


E4M3 = Format(3, -6, 448.0)
E5M2 = Format(2, -14, 57344.0)


def rounded(values: torch.Tensor, kind: Format) -> torch.Tensor:
    """``values`` times the largest power of two that keeps them in range (the largest value taken for 2^-100 at least),
    to the nearest number of ``kind`` (of two equally near the even one), and back; in float64."""
    exact = values.detach().double()
    largest = exact.abs().max()
    if not torch.isfinite(largest):
        return torch.full_like(exact, torch.nan)
    largest = largest.clamp(min=2.0**-100)
    scale = _power(torch.frexp(kind.largest / largest).exponent - 1)
    exact = exact * scale
    # x = m * 2^e with m in [0.5, 1): numbers around x are 2^(e - 1 - mantissa) apart, subnormal ones all alike.
    exponent = (torch.frexp(exact).exponent - 1).clamp(min=kind.smallest)
    spacing = _power(exponent - kind.mantissa)
    return (exact / spacing).round() * spacing / scale


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2 to a whole exponent, exactly: written as the bits of a float64."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


_ORDER = itertools.count()


class RoundedProduct(torch.autograd.Function):
    """``input @ weight.T`` of rounded values, in the dtype of ``input``: float8 numbers are numbers of bf16 too."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, layer: RoundedLinear) -> torch.Tensor:
        ctx.layer = layer
        x, w = (rounded(layer.shaken(t), E4M3).to(input.dtype) for t in (input, weight))
        ctx.save_for_backward(x, w)
        layer.products += 1
        layer.ran = next(_ORDER)
        return functional.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g = rounded(ctx.layer.shaken(grads[0]), E5M2).to(grads[0].dtype)
        of_input = g.matmul(w) if ctx.needs_input_grad[0] else None
        of_weight = g.flatten(0, -2).t().matmul(x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        ctx.layer.backward_products += (of_input is not None) + (of_weight is not None)
        return of_input, of_weight, None


class RoundedLinear(nn.Linear):
    """A linear layer whose product is that of rounded values, unless ``off``. Counts its products.
    ``ran``: when the last one was, in an order of all layers."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.off = False
        self.products = self.backward_products = self.ran = 0
        self.shake: torch.Generator | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.off:
            return super().forward(input)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        product: torch.Tensor = RoundedProduct.apply(input.to(dtype), self.weight.to(dtype), self)
        return product if self.bias is None else product + self.bias.to(dtype)

    def shaken(self, values: torch.Tensor) -> torch.Tensor:
        """``values``, or, where the layer is shaken, each off by one rounding of their dtype, up or down at random."""
        if self.shake is None:
            return values
        signs = torch.randint(0, 2, values.shape, generator=self.shake).mul_(2).sub_(1).to(values.device)
        return values.double() * (1 + signs * (torch.finfo(values.dtype).eps / 2))


def round_products(model: nn.Module, resolved: Resolved) -> None:
    """Let the linear layers in the model's blocks multiply rounded values: those whose sizes are multiples of 16."""
    blocks = [module for module in model.modules() if type(module).__name__ in resolved.blocks]
    for block in blocks:
        for owner in list(block.modules()):
            for name, child in list(owner.named_children()):
                if type(child) is nn.Linear and not (child.in_features % 16 or child.out_features % 16):
                    setattr(owner, name, RoundedLinear(child))


def rounded_layers(model: nn.Module) -> dict[str, RoundedLinear]:
    """The layers that ``round_products`` changed, by name; of those that adapters copied, the copies."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, RoundedLinear)}
    return {name: module for name, module in found.items() if "original_module" not in name.split(".")}


@contextlib.contextmanager
def shaken(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """The same model, whose layers multiply operands that are off by one rounding each."""
    draw = torch.Generator().manual_seed(seed)
    layers = [module for module in model.modules() if isinstance(module, RoundedLinear)]
    for layer in layers:
        layer.shake = draw
    try:
        yield
    finally:
        for layer in layers:
            layer.shake = None


@contextlib.contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """The same model without rounding."""
    layers = [module for module in model.modules() if isinstance(module, RoundedLinear)]
    for layer in layers:
        layer.off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.off = False
