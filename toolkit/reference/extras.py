"""What training adds to the plain cross-entropy: label smoothing, z-loss, balance, and options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from toolkit.recipe.schema import Recipe
from toolkit.reference.meeting import Meeting
from toolkit.reference.option import PlainOption
from toolkit.rooms import active_options


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
        options = tuple(option.plain(settings) for option, settings in active_options(recipe))
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
        return total + sum(option.loss_term(logits, targets) for option in self.options)

    def around(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Inside, a forward of ``model`` on ``inputs`` has the options."""
        return _all_of(option.around(model, inputs) for option in self.options)

    def on_rank(
        self, model: Any, rank: int, samples: bool, meeting: Meeting | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """``PlainOption.on_rank`` of every option."""
        return _all_of(option.on_rank(model, rank, samples, meeting) for option in self.options)


@contextlib.contextmanager
def _all_of(contexts: Iterable[contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
