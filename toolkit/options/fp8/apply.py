"""Matrix products in float8 (arXiv:2209.05433): a linear layer's input and weight are rounded to e4m3, the gradient of
its output to e5m2, each scaled into the format's range by its own largest value just then. The products are summed in
float32 and given back in the dtype that they would have had. Weights stay what they are.

Scales are powers of two, so that scaling rounds nothing and a value's rounding does not hang on what else is in its
micro-batch; at most one of the format's binades is lost at its lower end. A result that is not finite stays so.

Not torchao's Float8Linear (0.18.0), for the same products: it computes the gradient of frozen weights too and throws it
away (under LoRA three products where two are needed), keeps the layer's input in 16 bits for it where this keeps
float8 or nothing, and needs micro-batches of a multiple of 16 tokens for it on a GPU; and where it is installed PEFT
imports it, which writes of libraries that could not be loaded on the screen of every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.model.checkpointing import find_blocks
from toolkit.model.unreached import OWN_FUNCTIONS
from toolkit.options.fp8.spec import MULTIPLE, NEEDS, capability_message
from toolkit.recipe.resolve import Resolved
from toolkit.upstream.torch import float8_product

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of inputs and weights, and of gradients of outputs (arXiv:2209.05433, section 3)."""


class Fp8Linear(nn.Linear):
    """A linear layer, with the weight and bias of ``linear``, that multiplies in float8.

    Input (..., in_features) to output (..., out_features), in autocast's dtype if it is on, else in the weight's. Both
    sizes must be multiples of ``MULTIPLE``.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Autocast on meta tensors is acted out for the CPU's, see toolkit/planning.
        kind = "cpu" if input.is_meta else input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        product: torch.Tensor = Fp8Product.apply(input.to(dtype), self.weight, self.weight.requires_grad)
        return product if self.bias is None else product + self.bias.to(dtype)


class Fp8Product(torch.autograd.Function):
    """``input @ weight.T``: (..., in) and (out, in) to (..., out) in the dtype of ``input``.

    ``trains``: the weight gets a gradient, so the rounded input is kept for it.

    Of the weight it holds the parameter itself, not a view: what ZeRO-3 has gathered is let go after the forward.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, trains: bool) -> torch.Tensor:
        rows, scale = rounded(input.reshape(-1, input.shape[-1]), FORWARD)
        columns, weight_scale = rounded(weight.to(input.dtype), FORWARD)
        # Sums of the forward may be kept in fewer bits on a GPU, as others do; gradients' are not.
        product = _multiplied(rows, columns.t(), scale, weight_scale, input.dtype, fast=True)
        kept = (rows, scale) if trains else (None, None)
        ctx.save_for_backward(weight, *kept)
        return product.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, rows, scale = ctx.saved_tensors
        [grad] = grads
        back, back_scale = rounded(grad.reshape(-1, grad.shape[-1]), BACKWARD)
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            columns, weight_scale = rounded(weight.to(grad.dtype), FORWARD)
            of_input = _multiplied(back, _by_columns(columns), back_scale, weight_scale, grad.dtype)
            of_input = of_input.view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            # Summed over tokens: as many as there are, filled up with zeros.
            left, right = _filled(back.t()), _filled(rows.t()).t()
            of_weight = _multiplied(left, right, back_scale, scale, grad.dtype).to(weight.dtype)
        return of_input, of_weight, None


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``tensor`` of 16 or 32 bits in the float8 ``dtype``, and the scale: the product of both is near ``tensor``.

    The scale is a power of two, in float32 and of shape (): the inverse of the largest power of two that keeps every
    value in the range of ``dtype``. The largest value is taken for 2^-100 at least, so that both are finite. If it is
    not finite, all values and the scale are NaN.
    """
    # Numbers are written here, not named: torch.compile would make inputs of them, which autograd's functions
    # cannot have (torch 2.13.0, AssertionError in lift_tracked_freevar_to_input).
    largest = torch.linalg.vector_norm(tensor, float("inf")).float()
    # No minimum or maximum beside a cast to float8: Triton miscompiles some such kernels (triton-lang/triton#11111).
    largest = torch.where(largest < 2.0**-100, 2.0**-100, largest)
    # A float32 without its mantissa is the power of two below it.
    scale = ((torch.finfo(dtype).max / largest).view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = torch.where(largest.isfinite(), scale, torch.nan)  # a cast may give the largest number for infinity
    return (tensor * scale.to(tensor.dtype)).to(dtype), scale.reciprocal()


OWN_FUNCTIONS.add(Fp8Product.__name__)


def _multiplied(
    left: torch.Tensor, right: torch.Tensor, of_left: torch.Tensor, of_right: torch.Tensor, dtype: torch.dtype,
    fast: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``left`` by rows, ``right`` by columns, as the tensor cores of compute capability 8.9 and 9.0 want them."""
    return float8_product(left, right, of_left, of_right, dtype, fast)


def _by_columns(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.t().contiguous().t()


def _filled(matrix: torch.Tensor) -> torch.Tensor:
    """Rows filled up with zeros to a multiple of what a product can take, one after another in memory."""
    bytes_ = matrix.contiguous().view(torch.uint8)  # in which 0 is 0, too
    return functional.pad(bytes_, (0, -matrix.shape[1] % MULTIPLE)).view(matrix.dtype)


def check_device(resolved: Resolved) -> None:
    """Raise InputError if the training GPU has no float8 products."""
    if resolved.device == "cuda" and (found := torch.cuda.get_device_capability()) < NEEDS:
        raise InputError(f"{resolved.source}: fp8: {capability_message(found)}, or set fp8: false")


def prepare(model: nn.Module, settings: bool, resolved: Resolved) -> list[str]:
    """``convert`` the blocks of a recipe's model."""
    return convert(model, find_blocks(model, resolved), resolved)


def convert(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], resolved: Resolved) -> list[str]:
    """Replace the linear layers of ``blocks`` by Fp8Linear, in place, before adapters wrap them; returns their names.

    Layers of other sizes, of a class of their own, or that share a weight with an embedding stay. Raises InputError if
    none is left to convert.
    """
    inside = {id(module) for _, block in blocks for module in block.modules()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [
        name
        for name, module in model.named_modules()
        if id(module) in inside and type(module) is nn.Linear and fits(module) and id(module.weight) not in tables
    ]
    if not names:
        raise InputError(
            f"{resolved.source}: fp8: needs linear layers with sizes that are multiples of {MULTIPLE}, "
            "but the blocks of "
            f"{type(model).__name__} have none; set fp8: false to use bf16 products"
        )
    for name in names:
        owner, _, attribute = name.rpartition(".")
        linear: Any = model.get_submodule(name)
        setattr(model.get_submodule(owner), attribute, Fp8Linear(linear))
    return names


def fits(linear: nn.Linear) -> bool:
    """Whether float8 products support a layer's sizes."""
    return linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0


def fp8_layers(model: nn.Module) -> dict[str, Fp8Linear]:
    """The layers of a model, wrapped or not, that multiply in float8, by name; of those that adapters replace, the ones
    that compute."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    return {name: module for name, module in found.items() if "original_module" not in name.split(".")}
