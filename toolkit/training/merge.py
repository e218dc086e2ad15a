"""Merge an adapter into its base: by PEFT, and into a 4-bit base's dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.model.load import cast_parameters
from toolkit.model.packed_layers import unpack_layers


@torch.no_grad()
def merge_whole(adapted: Any, dtype: torch.dtype | None) -> nn.Module:
    """The base with the adapter folded in, in ``dtype``, or as it is; ``adapted`` is used up. A base in 4 bits has
    plain weights afterwards, of the values that were trained on. Raises InputError where PEFT cannot merge."""
    unpack_layers(adapted)
    for module in adapted.modules():
        if dtype is not None and hasattr(module, "base_layer"):
            for parameter in module.get_base_layer().parameters(recurse=False):
                # As values.py merges: in the wider of both dtypes, and rounded once.
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, dtype))
    merged: nn.Module = merged_by_peft(partial(merge_and_unload, adapted))
    if dtype is not None:
        cast_parameters(merged, dtype)
    return merged


def merge_and_unload(adapted: Any) -> Any:
    """PEFT's own; raises what it raises.

    peft 0.21.2 takes the ``weight`` of every trained copy that it puts back (huggingface/peft#3114, open); a classifier
    of several layers has none, and every method but those of LoRA ended in AttributeError. The copy is whole already.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper

    model = adapted.get_base_model()
    for name, wrapper in list(model.named_modules()):
        if isinstance(wrapper, AuxiliaryTrainingWrapper) and not hasattr(wrapper, "weight"):
            module = wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            model.set_submodule(name, module)
    return adapted.merge_and_unload()


def merged_by_peft(merge: Callable[[], Any]) -> Any:
    """What ``merge`` returns; raises InputError where PEFT cannot merge."""
    try:
        return merge()
    except (RuntimeError, ValueError, NotImplementedError) as error:  # a bias for layers that have none, say
        raise InputError(f"--merged: PEFT cannot merge this adapter: {error}; export the adapter alone") from None
