"""What training adds to the plain cross-entropy: label smoothing, z-loss, balance, and options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from toolkit.recipe.schema import Recipe
from toolkit.reference.option import PlainOption
from toolkit.rooms import asked_options


@dataclass(frozen=True)
class Extras:
    """``smoothing``: of labels. ``z_loss``: its coefficient. ``balance``: the balance loss of experts, where the
    model's config asks for one. ``options``: the recipe's.

    ``z_everywhere`` is a mistake that a diagnosis tries out: the z-loss of tokens without labels too.
    """

    smoothing: float = 0.0
    z_loss: float = 0.0
    balance: bool = False
    options: tuple[PlainOption, ...] = ()
    z_everywhere: bool = False

    @staticmethod
    def of(recipe: Recipe) -> Extras:
        """What the recipe asks for."""
        options = tuple(option.plain(settings) for option, settings in asked_options(recipe))
        return Extras(recipe.label_smoothing, recipe.z_loss, balance=True, options=options)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor, everywhere: torch.Tensor) -> torch.Tensor:
        """Summed over the ``targets`` (tokens,) that are not -100; ``logits`` (tokens, classes). ``everywhere``: the
        logits of all positions, the last of a row too, which predicts nothing."""
        total = functional.cross_entropy(
            logits, targets, ignore_index=-100, reduction="sum", label_smoothing=self.smoothing
        )
        if self.z_loss:
            counted = everywhere if self.z_everywhere else logits[targets != -100]
            total = total + (torch.logsumexp(counted, dim=1) ** 2).sum() * self.z_loss
        return total

    @contextlib.contextmanager
    def around(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, a forward of ``model`` on ``inputs`` has the options."""
        with contextlib.ExitStack() as stack:
            for option in self.options:
                stack.enter_context(option.around(model, inputs))
            yield
