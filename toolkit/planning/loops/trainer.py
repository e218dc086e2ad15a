"""transformers' Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.model.loss_terms import LossTerms
from toolkit.model.packed_layers import PackedLayer
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels

if TYPE_CHECKING:
    from toolkit.planning.loops.base import Loss


@contextlib.contextmanager
def linear4bit(model: nn.Module) -> Iterator[None]:
    """bitsandbytes 0.43 to 0.50, nn/modules.py, ``Linear4bit.forward``: the output has the dtype of the input, also
    where that is not the one computed in (``bnb_4bit_compute_dtype``, as the weights are unpacked in)."""
    own = PackedLayer.forward

    def forward(self: PackedLayer, input: torch.Tensor) -> torch.Tensor:
        return own(self, input.to(self.statistics.dtype)).to(input.dtype)

    PackedLayer.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedLayer.forward = own  # type: ignore[method-assign]


def trainer_loss(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    output = model(**tensors)
    loss = output.loss
    return _returned(output, loss)


def own_loss(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    """The model's own loss, and nothing else: a loop without accelerate."""
    loss: torch.Tensor = model(**tensors).loss
    return loss


def with_loss(function: Callable[..., torch.Tensor]) -> Loss:
    """The Trainer's loss where the model computes it by ``function``, of transformers' signature: inside of the model's
    forward, so that what the head read is still there."""

    def computed(
        model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
    ) -> torch.Tensor:
        if task_of(task).labels is not Labels.NEXT:
            return trainer_loss(model, config, tensors, task, terms)
        base: Any = getattr(model, "get_base_model", lambda: model)()
        own, base.loss_function = base.loss_function, function
        try:
            return trainer_loss(model, config, tensors, task, terms)
        finally:
            base.loss_function = own

    return computed


def shifted_copy(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
    """transformers 4.48.1, loss/loss_utils.py, ``ForCausalLMLoss``: float32 logits, then a copy without the last
    position."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))


def _returned(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """accelerate 1.15.0, utils/operations.py, ``convert_outputs_to_fp32``: what a model in mixed precision returns is
    copied to float32, the logits too, which nobody reads."""
    if torch.is_autocast_enabled("cpu") and output.logits is not None:
        output.logits = output.logits.float()
    return loss


shifted_loss = with_loss(shifted_copy)
"""That of the Trainer of transformers 4.48."""
