"""Training loops that a plan can be made for: how each computes the loss of a micro-batch, traced as it runs.

Another loop keeps other copies of the logits, which are the peak of many runs: each takes 2 or 4 bytes for every token
and word of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from toolkit.errors import InputError
from toolkit.model.loss_terms import LossTerms
from toolkit.optimizers import optimizer_kind
from toolkit.recipe.schema import Recipe
from toolkit.tasks import task_of
from toolkit.tasks.labels import Labels
from toolkit.training.loss import loss_sum

Loss = Callable[[nn.Module, Any, Mapping[str, torch.Tensor], str, LossTerms], torch.Tensor]


@dataclass(frozen=True)
class Loop:
    """``loss``: from the model to the loss, with what is alive meanwhile. ``source``: where its code is."""

    loss: Loss
    title: str
    source: str


def _trainer(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    output = model(**tensors)
    loss = output.loss
    return _returned(output, loss)


def _trainer_4_48(
    model: nn.Module, config: Any, tensors: Mapping[str, torch.Tensor], task: str, terms: LossTerms
) -> torch.Tensor:
    if task_of(task).labels is not Labels.NEXT:
        return _trainer(model, config, tensors, task, terms)
    output = model(**{name: tensor for name, tensor in tensors.items() if name != "labels"})
    labels = tensors["labels"][..., 1:].contiguous()
    logits = output.logits.float()
    shifted = logits[..., :-1, :].contiguous()
    loss = functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels.view(-1))
    del logits, shifted
    return _returned(output, loss)


def _returned(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """accelerate 1.15.0, utils/operations.py, ``convert_outputs_to_fp32``: what a model in mixed precision returns is
    copied to float32, the logits too, which nobody reads."""
    if torch.is_autocast_enabled("cpu"):
        output.logits = output.logits.float()
    return loss


LOOPS: dict[str, Loop] = {
    "toolkit": Loop(loss_sum, "toolkit train", "toolkit/training/loss.py"),
    "trainer": Loop(_trainer, "transformers' Trainer", "the model's own loss; transformers 5.23.0 loss/loss_utils.py"),
    "trainer-4.48": Loop(
        _trainer_4_48,
        "transformers' Trainer of version 4.48",
        "transformers 4.48.1 loss/loss_utils.py: float32 logits, then a copy without the last position",
    ),
}


def check_loop(name: str, recipe: Recipe) -> None:
    """Raise InputError if there is no such loop, or if it cannot train this recipe."""
    if name not in LOOPS:
        raise InputError(f"--loop {name}: is not one of {', '.join(LOOPS)}")
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
    if recipe.label_smoothing:
        raise InputError(
            f"--loop {name}: plan does not know what memory {title} takes for label smoothing; plan it with "
            "label_smoothing=0"
        )
    kind = optimizer_kind(recipe.optimizer.name)
    if kind.trainer(recipe.optimizer) is None:
        raise InputError(f"--loop {name}: {title} has no optimizer {kind.name}")
