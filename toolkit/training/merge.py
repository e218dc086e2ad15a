"""Merge an adapter into its base: by PEFT, and into a 4-bit base's dequantised weights, with a check of the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from toolkit.errors import InputError, RunFailed
from toolkit.model.nf4 import dequantise_base

_TOKENS = 64
SAFETY = 4.0
"""Rounding a merged weight moves it by up to half an epsilon, and the perturbation that measures what this does moves
every one of them by just that much, so it overstates; four is room for its being a single draw of signs."""


@torch.no_grad()
def merge_dequantised(adapted: Any) -> nn.Module:
    """The base with plain weights in its own dtype and the adapter folded in; ``adapted`` is used up.

    Raises RunFailed if its logits are further from the live adapter's than rounding the merged weights explains.
    """
    dequantise_base(adapted)  # the values that were trained on, to the bit
    inputs = _inputs(adapted.config)
    wrapped = (name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "base_layer"))
    names = [name.removesuffix(".token_adapter") for name in wrapped]  # within an embedding whose rows train
    with _InFloat32():
        live = adapted(**inputs).logits
    merged = merge_and_unload(adapted)
    changed = {id(merged.get_submodule(name).weight) for name in names}
    with _InFloat32():
        found = merged(**inputs).logits
    with _InFloat32(changed):
        perturbed = merged(**inputs).logits
    size = live.double().norm().item()
    noise = max((perturbed - found).double().norm().item() / size, torch.finfo(torch.float32).eps)
    error = (found - live).double().norm().item() / size
    if not math.isfinite(error) or error > SAFETY * noise:
        raise RunFailed(
            f"--merged: the merged model's logits differ by {error:.2g} off the live adapter's, where "
            "rounding its weights "
            f"to {str(next(merged.parameters()).dtype).removeprefix('torch.')} explains {SAFETY * noise:.2g}; "
            "nothing was written"
        )
    return merged


def merge_and_unload(adapted: Any) -> Any:
    """PEFT's own; raises what it raises.

    peft 0.21.2 takes the ``weight`` of every trained copy that it puts back (huggingface/peft#3114, open); a classifier
    of several layers has none, and every method but those of LoRA ended in AttributeError. The copy is whole already.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper

    tuner = adapted.base_model
    replace = tuner._replace_module

    def put_back(parent: nn.Module, name: str, module: nn.Module, wrapper: nn.Module) -> None:
        if isinstance(wrapper, AuxiliaryTrainingWrapper) and not hasattr(wrapper, "weight"):
            setattr(parent, name, module)
        else:
            replace(parent, name, module, wrapper)

    tuner._replace_module = put_back
    try:
        return adapted.merge_and_unload()
    finally:
        del tuner._replace_module


def merged_by_peft(merge: Callable[[], Any]) -> Any:
    """What ``merge`` returns; raises InputError where PEFT cannot merge."""
    try:
        return merge()
    except (RuntimeError, ValueError, NotImplementedError) as error:  # a bias for layers that have none, say
        raise InputError(f"--merged: PEFT cannot merge this adapter: {error}; export the adapter alone") from None


def _inputs(config: Any) -> dict[str, torch.Tensor]:
    text = config.get_text_config()
    draw = torch.Generator().manual_seed(0)
    # RoBERTa counts from the padding id on, so that its last positions have no place in the table.
    length = min(_TOKENS, (getattr(text, "max_position_embeddings", None) or 2 * _TOKENS) // 2)
    ids = torch.randint(0, text.vocab_size, (1, length), generator=draw)
    if getattr(config, "pad_token_id", None) is not None:
        ids[ids == config.pad_token_id] = (config.pad_token_id + 1) % text.vocab_size
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return tensors | ({"decoder_input_ids": ids.clone()} if config.is_encoder_decoder else {})


class _InFloat32(TorchFunctionMode):
    """Computes with float32 copies of weights as each is needed, so that a large model is never copied whole.
    ``perturbed``: ids of weights that are moved by half an epsilon of their dtype, up or down at random."""

    _FUNCTIONS = (functional.linear, functional.embedding, functional.layer_norm, functional.rms_norm)

    def __init__(self, perturbed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__()
        self._perturbed = perturbed
        self._draw = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._FUNCTIONS:
            args = tuple(map(self._cast, args))
            kwargs = {key: self._cast(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        copy = value.float()
        if id(value) in self._perturbed:
            signs = torch.randint(0, 2, copy.shape, generator=self._draw).mul_(2).sub_(1)
            copy = copy * (1 + signs * (torch.finfo(value.dtype).eps / 2))
        return copy
