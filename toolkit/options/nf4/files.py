"""Bases whose linear weights are packed in NF4 already (bitsandbytes' 4-bit checkpoints): their packed values are those
of the files, bit for bit.

transformers reads the files. Each layer of bitsandbytes becomes a linear layer that knows its packed weight, so that
PEFT adds its own adapters of linear layers; then ``quantise_base`` makes it an ``Nf4Linear``. In between, the layer's
weight is NaN in every element, and takes the memory of one: an adapter that read a value of it would be found at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.options.nf4.pack import BLOCK, NESTED, packed_nf4
from toolkit.recipe.resolve import Resolved
from toolkit.tasks import task_of
from toolkit.upstream.transformers import drop_conversions, not_quantised

Packed = tuple[torch.Tensor, Any]
"""Two weights per byte, flat, and bitsandbytes' QuantState of as many weights in one row."""


class StoredLinear(nn.Linear):
    """A frozen linear layer of which there is the packed weight (``packed``). ``weight``: NaN, of the dtype that it
    would have if it were not packed; shape (out_features, in_features)."""

    def __init__(self, layer: Any, packed: Packed, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        nothing = torch.full((), math.nan, dtype=dtype).expand(self.out_features, self.in_features)
        self.weight = nn.Parameter(nothing, requires_grad=False)
        self.bias = layer.bias
        self.packed = packed


def packed_weight(linear: nn.Module) -> Packed | None:
    """The packed weight of a layer that has one, and its statistics."""
    return linear.packed if isinstance(linear, StoredLinear) else None


def stored_weight(linear: nn.Module, storage: torch.dtype) -> Packed:
    """The same in elements of ``storage``, shape (elements, 1), as ``packed_nf4`` gives it."""
    assert isinstance(linear, StoredLinear)
    packed, statistics = linear.packed
    short = -packed.numel() % storage.itemsize
    whole = torch.cat([packed, packed.new_zeros(short)]) if short else packed.clone()
    return whole.view(storage).view(-1, 1), statistics


def take(model: Any, resolved: Resolved, dtype: torch.dtype) -> None:
    """Have a model hold what its files have packed, or would have packed where it has random weights."""
    take_packed(model, resolved, dtype) if resolved.recipe.model.path is not None else pack_drawn(model, resolved)


def take_packed(model: Any, resolved: Resolved, dtype: torch.dtype) -> None:
    """Replace bitsandbytes' 4-bit layers of a model, which transformers has read, in place: by ``StoredLinear``, or
    by plain layers with the dequantised weight where they are to be trained whole (``adapter.modules_to_save``) or are
    the head. Raises InputError for a format other than the one that ``quantization_config`` names."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, layer in list(model.named_modules()):
        if not isinstance(layer, Linear4bit):
            continue
        packed = _checked(layer, name, resolved, dtype)
        linear = StoredLinear(layer, packed, dtype)
        if _stays_plain(model, name, layer, resolved):
            values: torch.Tensor = dequantize_4bit(packed[0].view(-1, 1), packed[1])
            linear.weight = nn.Parameter(values.view(linear.weight.shape).to(dtype), requires_grad=False)
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight, plain.bias = linear.weight, linear.bias
            linear = plain  # type: ignore[assignment]
        model.set_submodule(name, linear)
    # These would have accelerate refuse it, PEFT take layers of bitsandbytes, a merged model be read as a packed one.
    for module in model.modules():
        for mark in ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit", "is_4bit_serializable",
                     "hf_device_map"):  # fmt: skip
            vars(module).pop(mark, None)
        if getattr(module, "config", None) is not None:
            without_marks(module.config)
    # A merged model is saved by reversing these; that which reads packed weights has no reverse.
    drop_conversions(model, _unpacks)


def _unpacks(conversion: Any) -> bool:
    return any(hasattr(operation, "hf_quantizer") for operation in getattr(conversion, "operations", ()))


def without_marks(config: Any) -> None:
    """Take what says that a model is quantised out of its config, in place."""
    for mark in ("quantization_config", "_is_quantized"):
        vars(config).pop(mark, None)


def configure(config: Any, resolved: Resolved) -> None:
    """Have transformers leave out the task's own heads, in place: a base that names what it leaves out does not name
    those that it does not have, and they would be packed with no weight to pack. A model with random weights is drawn
    as if it were plain."""
    if resolved.recipe.model.path is None:
        without_marks(config)
        return
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and found.get("llm_int8_skip_modules") is not None:
        found["llm_int8_skip_modules"] = [*found["llm_int8_skip_modules"], *task_of(resolved.recipe.model.task).heads]


def pack_drawn(model: Any, resolved: Resolved) -> None:
    """Pack, in place, what the files of a model with random weights would have packed."""
    assert resolved.stored is not None
    for name, linear in packed_linears(model, resolved).items():
        weight = linear.weight.detach()
        packed, statistics = packed_nf4(weight, torch.uint8, resolved.stored.nested)
        model.set_submodule(name, StoredLinear(linear, (packed.flatten(), statistics), weight.dtype))


def packed_linears(model: Any, resolved: Resolved) -> dict[str, nn.Linear]:
    """The linear layers, by name, that a model has packed; of one that has none, those that it is to have: all but
    those that transformers leaves out (5.17.0 to 5.23.0, replace_with_bnb_linear), and those that ``take_packed``
    leaves plain."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert resolved.stored is not None
    there = {name: module for name, module in model.named_modules() if isinstance(module, StoredLinear)}
    if there:
        return dict(there)
    named = resolved.stored.left_out
    heads = task_of(resolved.recipe.model.task).heads
    left_out = HfQuantizer.get_modules_to_not_convert(
        model, None if named is None else [*named, *heads], not_quantised(model)
    )
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and should_convert_module(name, left_out)
        and not _stays_plain(model, name, module, resolved)
    }


def _stays_plain(model: Any, name: str, layer: nn.Module, resolved: Resolved) -> bool:
    adapter = resolved.recipe.adapter
    saved = adapter.modules_to_save if adapter else ()
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    return layer is find() or any(name == wanted or name.endswith(f".{wanted}") for wanted in saved)


def _checked(layer: Any, name: str, resolved: Resolved, dtype: torch.dtype) -> Packed:
    """The packed bytes of a layer of bitsandbytes, and its statistics, for as many weights in one row (``packed_nf4``
    says why), to be unpacked in ``dtype`` whatever the dtype that was packed: bitsandbytes' own product (0.50.2,
    gemm_4bit) unpacks in that of its input, too."""
    from bitsandbytes.functional import get_4bit_type

    assert resolved.stored is not None
    state = getattr(layer.weight, "quant_state", None)
    where = f"{resolved.source}: model.path: {name}"
    if state is None:
        raise InputError(f"{where}: the files have no packed weight for it, but its quantization_config asks for one")
    seen = {"bnb_4bit_quant_type": state.quant_type, "blocksize": state.blocksize, "double quantisation": state.nested}
    wanted = {"bnb_4bit_quant_type": "nf4", "blocksize": BLOCK, "double quantisation": resolved.stored.nested}
    if state.nested:
        seen["nested blocksize"], wanted["nested blocksize"] = state.state2.blocksize, NESTED
    for key, value in wanted.items():
        if seen[key] != value:
            raise InputError(f"{where}: {key} of its packed weight is {seen[key]}, expected {value}")
    if not torch.equal(state.code.cpu(), get_4bit_type("nf4", device="cpu")):
        raise InputError(f"{where}: weight.quant_map of its packed weight is not NF4's")
    state.dtype = dtype
    state.shape = torch.Size([1, layer.out_features * layer.in_features])  # as in pack.py
    return layer.weight.data.flatten().view(torch.uint8), state
