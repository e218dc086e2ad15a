"""What training adds to the plain cross-entropy: label smoothing, z-loss, noise on the embeddings, and balance; and the
moving average of weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from toolkit.recipe.schema import Recipe


@dataclass(frozen=True)
class Extras:
    """``smoothing``: of labels. ``z_loss``: its coefficient. ``alpha``: of the noise. ``balance``: the balance loss of
    experts, where the model's config asks for one.

    The others are mistakes that a diagnosis tries out. ``z_everywhere``: the z-loss of tokens without labels too.
    ``padded_length``: noise of a row's padded length, not of each sample's own.
    """

    smoothing: float = 0.0
    z_loss: float = 0.0
    alpha: float = 0.0
    balance: bool = False
    z_everywhere: bool = False
    padded_length: bool = False

    @staticmethod
    def of(recipe: Recipe) -> Extras:
        """What the recipe asks for."""
        return Extras(recipe.label_smoothing, recipe.z_loss, recipe.model.neftune_alpha or 0.0, balance=True)

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
    def on_embeddings(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, with ``alpha``, the embeddings of ``inputs`` have noise if the model is in training mode."""
        if not self.alpha or not model.training:
            yield
            return

        def add(module: Any, args: Any, embedded: torch.Tensor) -> torch.Tensor:
            rows, length, width = embedded.shape
            scales = [
                [self.alpha / math.sqrt(n * width) if n else 0.0 for n in row]
                for row in ([[length] * length] * rows if self.padded_length else _lengths(inputs))
            ]
            draw = torch.rand(embedded.shape, dtype=torch.float32, device=embedded.device)
            noise = (2 * draw - 1) * torch.tensor(scales, dtype=torch.float32, device=embedded.device)[:, :, None]
            return embedded + noise.to(embedded.dtype)

        handle = model.get_input_embeddings().register_forward_hook(add)
        try:
            yield
        finally:
            handle.remove()


def _lengths(inputs: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """At each token, the tokens of its sample; 0 at padding."""
    if "attention_mask" in inputs:
        return [[sum(row) if seen else 0 for seen in row] for row in inputs["attention_mask"].tolist()]
    found = []
    for row in inputs["position_ids"].tolist():
        starts = [at for at, position in enumerate(row) if position == 0]
        ends = [*starts[1:], len(row)]
        found.append([end - start for start, end in zip(starts, ends, strict=True) for _ in range(start, end)])
    return found


def plain_average(before: torch.Tensor, weight: torch.Tensor, updates: int, settings: Any) -> torch.Tensor:
    """The moving average of a weight after so many ``updates``, by its definition in float64, from the average
    ``before`` and the weight. ``settings``: the recipe's ``run.ema``."""
    if updates <= settings.start:
        return weight.double()
    if (updates - settings.start) % settings.every:
        return before.double()
    return settings.decay * before.double() + (1 - settings.decay) * weight.double()
