"""QLoRA's base (arXiv:2305.14314): linear weights in 4 bits, frozen, given back in 16 or 32 for each product.

bitsandbytes packs and unpacks. The packed weight is an ordinary parameter, so every strategy spreads it as it spreads
any other; what unpacks it (a byte for 64 weights, a float32 for 16,384) stays whole on every device.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.recipe.quantisable import why_no_quantiser
from toolkit.recipe.resolve import Resolved

# On a CPU 0.50.2 says, whenever it is imported (PEFT does, for every adapter), that an optional kernel is not there.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

BLOCK, NESTED = 64, 256
"""Weights that share a statistic; statistics that share one themselves (section 3 of the paper)."""


class Nf4Linear(nn.Linear):
    """A frozen linear layer whose weight is NF4 with double quantisation, packed in elements of ``storage``."""

    def __init__(self, linear: nn.Linear, storage: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed, self.statistics = packed_nf4(linear.weight.detach(), storage)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Autocast on meta tensors is acted out for the CPU's, see toolkit/plan.
        kind = "cpu" if input.is_meta else input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        product: torch.Tensor = _Product.apply(input, self)
        return product

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as it computes. The parameter must be whole just now, as it is within forward and backward."""
        from bitsandbytes.functional import dequantize_4bit

        if self.statistics.absmax.device != self.weight.device:
            self.statistics.to(self.weight.device)  # FSDP and DeepSpeed move parameters and buffers alone
        weight: torch.Tensor = dequantize_4bit(self.weight.detach().view(-1, 1), self.statistics)
        return weight.view(self.out_features, self.in_features).to(dtype)

    def plain(self) -> nn.Linear:
        """The layer with its dequantised weight, in the dtype that was quantised."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dequantised(self.statistics.dtype), requires_grad=False)
        linear.bias = self.bias
        return linear

    def empty_statistics(self, dtype: torch.dtype) -> Any:
        """Statistics of the same sizes, without their values, made where tensors are made now: for tracing."""
        made = copy.copy(self.statistics)
        made.state2, made.dtype = copy.copy(made.state2), dtype
        for state in (made, made.state2):
            for name in ("absmax", "offset", "code"):
                if isinstance(tensor := getattr(state, name), torch.Tensor):
                    setattr(state, name, torch.empty(tensor.shape, dtype=tensor.dtype))
        return made

    def statistics_bytes(self) -> int:
        """What unpacking needs beside the packed weight."""
        state = self.statistics
        tensors = (state.absmax, state.offset, state.code, state.state2.absmax, state.state2.code)
        return sum(t.numel() * t.element_size() for t in tensors)


class _Product(torch.autograd.Function):
    """Unpacks again in the backward. It holds the layer and no tensor of it: bitsandbytes' own product keeps a view of
    the packed weight, so that what ZeRO-3 has gathered would stay gathered until the backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: Nf4Linear) -> torch.Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(input.dtype)
        return functional.linear(input, layer.dequantised(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad.matmul(ctx.layer.dequantised(grad.dtype)), None


def packed_nf4(weight: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, Any]:
    """A weight in 4 bits and the statistics that unpack it, of blocks of 64, themselves in 8 bits by 256.

    As one row: on a CPU with AVX-512, bitsandbytes 0.50.2 unpacks rows that are no multiple of 64 long with the sizes
    of other blocks (40 % off where 9 % is right; rows of 32)."""
    from bitsandbytes.functional import create_dynamic_map, name2qmap, quantize_4bit

    if "dynamic" not in name2qmap:
        # Kept for the process on the device of its first use: after a plan, on the meta device (bitsandbytes 0.50.2).
        with torch.device("cpu"):
            name2qmap["dynamic"] = create_dynamic_map()
    row = weight.flatten()
    return quantize_4bit(row, blocksize=BLOCK, compress_statistics=True, quant_type="nf4", quant_storage=storage)


def quantise_base(model: nn.Module, linears: Mapping[str, nn.Linear], resolved: Resolved) -> None:
    """Put ``linears``, wherever they stand in ``model``, into 4 bits, in place and one after another.

    On the CPU whatever the device, so that a run, its export and `verify` have the same base to the bit; from the dtype
    that frozen weights have under the recipe's precision; and once adapters stand around them, which PEFT makes in
    their dtype: they begin as LoRA's do. Raises InputError where bitsandbytes is not installed or nothing is given.
    """
    assert resolved.base_storage is not None
    if (reason := why_no_quantiser()) is not None:
        raise InputError(f"{resolved.source}: adapter.method: qlora {reason}")
    storage = getattr(torch, resolved.base_storage)
    if not linears:
        raise InputError(
            f"{resolved.source}: adapter.method: qlora quantises linear layers within the blocks, and "
            f"{type(model).__name__} has none; take lora"
        )
    wanted = {id(linear) for linear in linears.values()}
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if id(child) in wanted:
                setattr(owner, name, Nf4Linear(child, storage))  # type: ignore[arg-type]
                child.weight = None  # type: ignore[assignment]  # whoever still has the layer keeps no plain weight


def dequantise_base(model: nn.Module) -> None:
    """Plain linear layers with the dequantised weights in place of the 4-bit ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Nf4Linear):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, module.plain())


def base_linears(model: nn.Module, resolved: Resolved) -> dict[str, nn.Linear]:
    """The linear layers of a model without adapters that QLoRA quantises: neither the head, which stays as the
    embeddings do, nor what stands beside the base model (a classifier's), nor what trains (``modules_to_save``)."""
    adapter = resolved.recipe.adapter
    return dict(_base_linears(model, adapter.modules_to_save if adapter else ()))


def _base_linears(model: nn.Module, saved: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    base: Any = getattr(model, "base_model", model)
    inside = {id(module) for module in base.modules()}
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = get_head()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, Nf4Linear) or module is head:
            continue
        if id(module) not in inside or id(module.weight) in tables:
            continue
        if any(name == wanted or name.endswith(f".{wanted}") for wanted in saved):
            continue
        yield name, module


def nf4_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """The 4-bit layers of a model, wrapped or not, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Nf4Linear)}


def weight_count(model: nn.Module) -> int:
    """Parameters of a model as they are meant: two weights stand in a byte of a packed one."""
    packed = nf4_layers(model).values()
    total = sum(p.numel() for p in model.parameters()) - sum(layer.weight.numel() for layer in packed)
    return total + sum(layer.in_features * layer.out_features for layer in packed)
