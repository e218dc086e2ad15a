"""QLoRA's base (arXiv:2305.14314): frozen linear weights in 4 bits, dequantised to 16 or 32 bits for each product.

bitsandbytes quantises and dequantises; a model whose files have them in 4 bits already is not quantised again, see
``files.py``. Statistics are a byte per 64 weights and a float32 per 16,384.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.packed_layers import PackedLayer
from toolkit.options.nf4.files import packed_linears, packed_weight, stored_weight
from toolkit.options.nf4.pack import BLOCK, NESTED, can_share, packed_by_all, packed_nf4
from toolkit.options.nf4.spec import no_quantiser
from toolkit.recipe.resolve import Resolved
from toolkit.upstream.transformers import not_quantised


class Nf4Linear(PackedLayer):
    """A frozen linear layer whose weight is NF4 with double quantisation: two weights per byte, shape (elements, 1).
    ``statistics``: bitsandbytes' QuantState, or Sizes."""

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(self.statistics, Sizes):
            return self.statistics.dequantised().view(self.out_features, self.in_features).to(dtype)
        from bitsandbytes.functional import dequantize_4bit

        if self.statistics.absmax.device != self.weight.device:
            self.statistics.to(self.weight.device)  # FSDP and DeepSpeed move parameters and buffers alone
        weight: torch.Tensor = dequantize_4bit(self.weight.detach().view(-1, 1), self.statistics)
        return weight.view(self.out_features, self.in_features).to(dtype)

    def empty_statistics(self, dtype: torch.dtype) -> Any:
        made = copy.copy(self.statistics)
        made.state2, made.dtype = copy.copy(made.state2), dtype
        for state in (made, made.state2):
            if state is None:
                continue  # statistics that are not quantised themselves
            for name in ("absmax", "offset", "code"):
                if isinstance(tensor := getattr(state, name), torch.Tensor):
                    setattr(state, name, torch.empty(tensor.shape, dtype=tensor.dtype))
        return made

    def statistics_bytes(self) -> int:
        """Bytes of its levels of statistics, with tables."""
        state = self.statistics
        tensors = [state.absmax, state.code]
        if state.state2 is not None:
            tensors += [state.offset, state.state2.absmax, state.state2.code]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass
class Sizes:
    """Statistics by size alone, under bitsandbytes' names; ``state2``: those of the statistics themselves.

    ``dtype`` and ``elements``: of what was quantised. ``absmax``: a statistic per block.
    """

    dtype: torch.dtype
    elements: int
    absmax: torch.Tensor
    code: torch.Tensor
    offset: Any = None
    state2: Any = None

    def dequantised(self) -> torch.Tensor:
        """An empty tensor of shape (elements,) and ``dtype``, allocated as unpacking does (bitsandbytes 0.50.2,
        dequantize_4bit: the statistics as float32, then the weight), and counted as the kernel that it is: half a byte
        read and an element written."""
        from toolkit.planning.meter import kernel

        if self.state2 is not None:
            absmax = torch.empty(self.absmax.shape, dtype=torch.float32, device=self.absmax.device)
            absmax += self.offset
        made = torch.empty(self.elements, dtype=self.dtype, device=self.absmax.device)
        kernel(made, more=self.elements / 2)
        return made


def sized_nf4(weight: torch.Tensor, storage: torch.dtype, nested: bool = True) -> tuple[torch.Tensor, Sizes]:
    """What `packed_nf4` gives, by size, on the weight's device: two weights per byte in elements of ``storage``, shape
    (elements, 1); a uint8 for each ``BLOCK`` weights, a float32 for each ``NESTED`` of these (arXiv:2305.14314, section
    3), and the tables of both; without ``nested`` a float32 for each ``BLOCK`` weights and its table."""
    elements = weight.numel()
    blocks = -(-elements // BLOCK)

    def empty(length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(length, dtype=dtype, device=weight.device)

    packed = empty(-(-elements // (2 * storage.itemsize)), storage).view(-1, 1)
    if not nested:
        return packed, Sizes(weight.dtype, elements, empty(blocks, torch.float32), empty(16, torch.float32))
    second = Sizes(torch.float32, blocks, empty(-(-blocks // NESTED), torch.float32), empty(256, torch.float32))
    offset = torch.empty((), dtype=torch.float32, device=weight.device)
    sizes = Sizes(weight.dtype, elements, empty(blocks, torch.uint8), empty(16, torch.float32), offset, second)
    return packed, sizes


def quantise_base(
    model: nn.Module, linears: Mapping[str, nn.Linear], resolved: Resolved, together: bool = False
) -> None:
    """Quantise ``linears`` of ``model`` to 4 bits, in place and one after another.

    On the CPU whatever the device, so that a run, its export and `verify` have the same base to the bit; from the dtype
    that frozen weights have under the recipe's precision; and once adapters wrap them, which PEFT makes in
    their dtype: they begin as LoRA's do. ``together``: all ranks call it, each packs a part of the layers and gets the
    others'. What the model's files have in 4 bits is taken as it is. Raises InputError if bitsandbytes is needed and
    missing, or no layer is given.
    """
    if (reason := no_quantiser(resolved.stored)) is not None:
        raise InputError(f"{resolved.source}: {reason}")
    _replace(model, linears, resolved, _packings(list(linears.values()), _storage(resolved), together))


def size_base(model: nn.Module, linears: Mapping[str, nn.Linear], resolved: Resolved, double_quant: bool) -> None:
    """``quantise_base`` of a plan: nothing is computed, and it needs no bitsandbytes. ``double_quant`` False: float32
    statistics, also of a base that the recipe has doubly quantised."""
    storage, nested = _storage(resolved), double_quant and (resolved.stored is None or resolved.stored.nested)
    sized = ((linear, sized_nf4(linear.weight.detach(), storage, nested)) for linear in linears.values())
    _replace(model, linears, resolved, sized)


def _storage(resolved: Resolved) -> torch.dtype:
    return getattr(torch, str(resolved.base_storage))


def _replace(
    model: nn.Module, linears: Mapping[str, nn.Linear], resolved: Resolved, packings: Iterable[tuple[nn.Linear, Any]]
) -> None:
    if not linears and resolved.stored is not None:
        raise InputError(f"{resolved.source}: model: its quantization_config leaves out every linear layer")
    if not linears:
        raise InputError(
            f"{resolved.source}: adapter.method: qlora quantises the linear layers of the blocks, but "
            f"{type(model).__name__} has none; use lora"
        )
    places = _places(model, linears.values())
    for linear, packed in packings:
        layer = Nf4Linear(linear, *packed)
        for owner, name in places[linear]:
            setattr(owner, name, layer)
        linear.weight = None  # type: ignore[assignment]  # whoever still has the layer keeps no plain weight


def _packings(linears: list[nn.Linear], storage: torch.dtype, together: bool) -> Iterable[tuple[nn.Linear, Any]]:
    if any(packed_weight(linear) is not None for linear in linears):
        return ((linear, stored_weight(linear, storage)) for linear in linears)
    if together and can_share():
        return packed_by_all(linears, storage)
    return ((linear, packed_nf4(linear.weight.detach(), storage)) for linear in linears)


def _places(model: nn.Module, linears: Iterable[nn.Linear]) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """The position of each layer: its owners (which adapters may have become), and its name there."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {linear: [] for linear in linears}
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.Linear) and child in places:
                places[child].append((owner, name))
    return places


def base_linears(model: nn.Module, resolved: Resolved) -> dict[str, nn.Linear]:
    """The linear layers of a model without adapters that are in 4 bits. Those that its files have so, or would have
    (``files.py``); or, as QLoRA quantises them, neither the head, which stays as the
    embeddings do, nor what is beside the base model (a classifier's), nor what trains (``modules_to_save``), nor
    what transformers leaves out (``_keep_in_fp32_modules``: T5's ``wo``, whose block casts its input to the weight's
    dtype, would get bytes)."""
    adapter = resolved.recipe.adapter
    if resolved.stored is not None:
        return packed_linears(model, resolved)
    return dict(_base_linears(model, adapter.modules_to_save if adapter else ()))


def _base_linears(model: nn.Module, saved: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    base: Any = getattr(model, "base_model", model)
    saved = [*saved, *(not_quantised(base) or ())]
    inside = {id(module) for module in base.modules()}
    get_head = getattr(model, "get_output_embeddings", lambda: None)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = get_head()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, PackedLayer) or module is head:
            continue
        if id(module) not in inside or id(module.weight) in tables:
            continue
        if any(own == wanted or own.endswith(f".{wanted}") for wanted in saved for own in (name, f"{name}.weight")):
            continue
        yield name, module
