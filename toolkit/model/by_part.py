"""``from_pretrained`` without reading the weights: every parameter stays on the meta device and knows its source.

transformers itself (5.17.0 to 5.23.0) decides which tensors of the files make up which parameter: its renames and
conversions run on tensors without values, are recorded, and run again on values when a parameter is filled. Weights
that the files lack are drawn and buffers are computed as always.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from toolkit.machine import READ_AT_ONCE
from toolkit.model.sources import Cast, Made, NotByPart, Source, give, set_values, sources
from toolkit.model.stored import Stored, stored_in
from toolkit.upstream.transformers import loading_by

_log = logging.getLogger(__name__)


@dataclass
class Found:
    """The sources of a model's parameters and persistent buffers by name."""

    by_name: dict[str, Source] = field(default_factory=dict)

    def attach(self, model: Any) -> None:
        """Give every parameter its source and every buffer its values. Raises NotByPart if one has neither."""
        self._tie(model)
        for name, source in self.by_name.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            tensor = getattr(module, attribute)
            if not tensor.is_meta:
                continue  # of another shape than the model's: drawn
            if not isinstance(tensor, nn.Parameter):
                setattr(module, attribute, source.whole())
                continue
            if not tensor.is_contiguous():  # what a conversion has cut out
                tensor.data = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            give(tensor, source)
        sources(model)

    def _tie(self, model: Any) -> None:
        """Where the files have both of two tied weights, transformers ties them if they are equal. It leaves those
        without values as they are."""
        for target, origin in list(model.all_tied_weights_keys.items()):
            one, other = (model.get_parameter(name) for name in (target, origin))
            if one is other or not (one.is_meta and other.is_meta) or not {target, origin} <= self.by_name.keys():
                continue
            if _equal(self.by_name[target], self.by_name[origin], one, other):
                owner, _, attribute = target.rpartition(".")
                setattr(model.get_submodule(owner), attribute, other)
                del self.by_name[target]
            else:
                del model.all_tied_weights_keys[target]
                _log.warning(
                    "%s and %s are tied by the model's config, but differ in its files: not tied", target, origin
                )


def _equal(one: Source, other: Source, first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for at in range(0, first.numel(), READ_AT_ONCE):
        parts = [torch.empty(min(READ_AT_ONCE, first.numel() - at), dtype=first.dtype) for _ in range(2)]
        for source, part in zip((one, other), parts, strict=True):
            source.fill(part, at)
        if not torch.equal(*parts):
            return False
    return True


@contextlib.contextmanager
def recorded() -> Iterator[Found]:
    """Context in which ``from_pretrained`` reads no weights: ``attach`` what was found to the model that it returns.

    It raises NotByPart for quantised weights, for files other than safetensors, for a model's code from the hub, and
    for weights that do not fit the model.
    """
    from transformers import core_model_loading

    found = Found()
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(loading_by(_without_values)):
            raise NotByPart("this transformers loads by another function")
        for owner, name, new in (
            (core_model_loading, "spawn_materialize", _Leaf),
            *(
                (kind, "convert", _recording(kind.convert, found))
                for kind in (core_model_loading.WeightRenaming, core_model_loading.WeightConverter)
            ),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield found


def _without_values(
    load: Callable[..., Any], model: Any, state_dict: Any, files: Any, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """transformers' loading of files into a model, given what is in them instead of their values."""
    if config.hf_quantizer is not None:
        raise NotByPart("its weights are quantised")
    if model.is_custom_code():
        raise NotByPart("its code is not transformers' own")
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise NotByPart("its weights are not in safetensors files")
    try:
        stored = stored_in(files)
    except KeyError as error:
        raise NotByPart(f"its files have values of type {error.args[0]}") from None
    info, index = load(model, stored, files, config, *args, **kwargs)
    if info.conversion_errors or info.mismatched_keys or info.error_msgs:
        raise NotByPart("its files do not fit the model")
    return info, index


class _Leaf:
    """Stands for a tensor of a file in transformers' conversions, in place of the function that would read it."""

    def __init__(self, pool: Any, tensor: Any, device: Any = None, dtype: Any = None, *_: Any, **__: Any) -> None:
        if not isinstance(tensor, Stored):
            raise NotByPart("its weights are read by something else than transformers")
        self.source = Cast(tensor, dtype or tensor.dtype)

    def __call__(self) -> torch.Tensor:
        return torch.empty(self.source.stored.shape, dtype=self.source.dtype, device="meta")


def _recording(convert: Callable[..., dict[str, Any]], found: Found) -> Callable[..., dict[str, Any]]:
    def wrapped(self: Any, layer_name: str, **kwargs: Any) -> dict[str, Any]:
        leaves = {pattern: list(ones) for pattern, ones in self.collected_tensors.items()}
        made = convert(self, layer_name, **kwargs)
        for name in made:
            found.by_name[name] = _source(convert, self, layer_name, kwargs, leaves, name)
        return made

    return wrapped


def _source(
    convert: Callable[..., dict[str, Any]],
    transform: Any,
    layer_name: str,
    kwargs: dict[str, Any],
    leaves: dict[str, list[_Leaf]],
    name: str,
) -> Source:
    """Of the tensor ``name`` that a rename or conversion makes."""
    if not hasattr(transform, "operations"):
        [[leaf]] = leaves.values()
        return leaf.source
    arguments = kwargs | {"loading_info": None}  # errors are raised instead of noted

    def make() -> torch.Tensor:
        for pattern, ones in leaves.items():
            transform.collected_tensors[pattern] = [leaf.source.whole for leaf in ones]
        made = convert(transform, layer_name, **arguments)[name]
        tensor: torch.Tensor = made[0] if isinstance(made, list) else made
        return tensor

    return Made(make)


def materialise(model: nn.Module) -> None:
    """Give every parameter its values, one after another, on the CPU."""
    for name, source in sources(model).items():
        parameter = model.get_parameter(name)
        set_values(parameter, source.whole().to(parameter.dtype).view(parameter.shape))
