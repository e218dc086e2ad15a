"""Training loops that a plan can be made for: how each computes the loss of a micro-batch, traced as it runs.

Another loop keeps other copies of the logits, which are the peak of many runs: each takes 2 or 4 bytes for every token
and word of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.model.loss_terms import LossTerms
from toolkit.model.nf4 import Nf4Linear
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.resolve import Precision, Resolved
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels
from toolkit.training.loss import loss_sum

Loss = Callable[[nn.Module, Any, Mapping[str, torch.Tensor], str, LossTerms], torch.Tensor]
Acting = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class LoopPrecision(Precision):
    """The dtypes of a loop that autocasts, or does not, whatever the trained weights are in. ``packed``: the dtype that
    4-bit weights are unpacked in. ``norms``: that of frozen weights of one dimension, "" if it is ``frozen``."""

    autocast: bool = False
    packed: str = "bfloat16"
    norms: str = ""

    @property
    def everywhere(self) -> bool:
        return self.autocast

    @property
    def vectors(self) -> str:
        return self.norms or self.frozen

    @property
    def mixed(self) -> bool:
        return self.autocast

    @property
    def unpacked(self) -> str:
        return self.packed


def as_resolved(resolved: Resolved) -> Precision:
    """The recipe's own precision."""
    return resolved.precision


@contextlib.contextmanager
def linear4bit(model: nn.Module) -> Iterator[None]:
    """bitsandbytes 0.43 to 0.50, nn/modules.py, ``Linear4bit.forward``: the output has the dtype of the input, also
    where that is not the one computed in."""
    own = Nf4Linear.forward

    def forward(self: Nf4Linear, input: torch.Tensor) -> torch.Tensor:
        return own(self, input).to(input.dtype)

    Nf4Linear.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Nf4Linear.forward = own  # type: ignore[method-assign]


def _nothing(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Loop:
    """``loss``: from the model to the loss, with what is alive meanwhile. ``source``: where its code is. ``precision``:
    the dtypes that it trains a recipe in. ``acting``: entered while its model is traced. ``reentrant``: whether blocks
    are checkpointed with ``use_reentrant=True``."""

    loss: Loss
    title: str
    source: str
    precision: Callable[[Resolved], Precision] = as_resolved
    acting: Acting = _nothing
    reentrant: bool = False


def adapters_in_float32(resolved: Resolved) -> Precision:
    """PEFT 0.13 to 0.21 (tuners_utils.py, ``cast_adapter_dtype``) makes adapters in float32 whatever the base is in;
    bf16-pure has no autocast, so that adapters compute in float32."""
    own = resolved.precision
    if resolved.recipe.adapter is None or own.mixed or own.compute == "float32":
        return own
    return LoopPrecision(own.compute, "float32", own.frozen, packed=own.compute)


def _trainer(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    output = model(**tensors)
    loss = output.loss
    return _returned(output, loss)


def with_loss(function: Callable[..., torch.Tensor]) -> Loss:
    """The Trainer's loss where the model computes it by ``function``, of transformers' signature: inside of the model's
    forward, so that what the head read is still there."""

    def computed(
        model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
    ) -> torch.Tensor:
        if task_of(task).labels is not Labels.NEXT:
            return _trainer(model, config, tensors, task, terms)
        base: Any = getattr(model, "get_base_model", lambda: model)()
        base.loss_function = function
        try:
            return _trainer(model, config, tensors, task, terms)
        finally:
            del base._loss_function

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


LOOPS: dict[str, Loop] = {
    "toolkit": Loop(loss_sum, "toolkit train", "toolkit/training/loss.py"),
    "trainer": Loop(
        _trainer,
        "transformers' Trainer",
        "the model's own loss; transformers 5.23.0 loss/loss_utils.py",
        adapters_in_float32,
        linear4bit,
    ),
    "trainer-4.48": Loop(
        with_loss(shifted_copy),
        "transformers' Trainer of version 4.48",
        "transformers 4.48.1 loss/loss_utils.py: float32 logits, then a copy without the last position",
        adapters_in_float32,
        linear4bit,
        reentrant=True,
    ),
}


def check_loop(name: str, recipe: Recipe) -> None:
    """Raise InputError if there is no such loop, or if it cannot train this recipe."""
    if name not in LOOPS:
        raise InputError(f"--loop {name}: not one of {', '.join(LOOPS)}")
    if name == "toolkit":
        return
    title = LOOPS[name].title
    for key, value, default in (
        ("loss", recipe.loss, "plain"),
        ("activation_offload", recipe.activation_offload, False),
        ("fp8", recipe.fp8, False),
        ("z_loss", recipe.z_loss, 0.0),
    ):
        if value != default:
            raise InputError(
                f"--loop {name}: {title} has no {key}: {str(value).lower()}; plan it with {key}={str(default).lower()}"
            )
    if recipe.run.ema is not None:
        raise InputError(f"--loop {name}: {title} has no run.ema; plan it with run.ema=null")
    if recipe.strategy.mesh is not None and recipe.strategy.mesh.context > 1:
        raise InputError(f"--loop {name}: {title} does not divide rows; plan it without strategy.mesh.context")
    if recipe.label_smoothing:
        raise InputError(
            f"--loop {name}: plan does not know what memory {title} takes for label smoothing; plan it with "
            "label_smoothing=0"
        )
    kind = optimizer_kind(recipe.optimizer.name)
    if kind.trainer(recipe.optimizer) is None:
        raise InputError(f"--loop {name}: {title} has no optimizer {kind.name}")
