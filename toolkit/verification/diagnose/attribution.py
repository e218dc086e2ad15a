"""A wrong gradient as a sum of right ones: with what weight each micro-batch is in it.

The gradient of a window is linear in its micro-batches. So the weights that were really used can be solved for,
from thousands of equations in a handful of unknowns, and their pattern shows what went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.verification.compare.replay import Reference

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Attribution:
    """``weights``: by micro-batch in the order of the window, 1 where right; NaN where it has no gradient.
    ``residual``: what part of the gradient they do not explain (2-norm, relative)."""

    weights: list[float]
    places: list[tuple[int, int]]
    """(data-parallel rank, micro) of each."""
    tokens: list[int]
    residual: float


class MicroGradients:
    """The gradient of each micro-batch of one step, at given weights, over the window's supervised tokens."""

    def __init__(self, reference: Reference, step: int, weights: Tensors) -> None:
        reference.set_weights(weights)
        window = reference.windows[step]
        # The parts of a row are computed together, so their losses can only be weighted together.
        count = reference.resolved.mesh.context
        total = max(1, sum(micro.supervised for _, micro in window))
        rows = [window[at : at + count] for at in range(0, len(window), count)]
        self.places = [(row[0][0] // count, row[0][1].micro) for row in rows]
        self.tokens = [sum(micro.supervised for _, micro in row) for row in rows]
        self.by_micro: list[Tensors] = []
        for row, tokens in zip(rows, self.tokens, strict=True):
            reference.loop.backward(step, row)
            share = max(1, tokens) / total
            self.by_micro.append({name: g.double().cpu() * share for name, g in reference.loop.gradients.items()})

    def attribute(self, gradient: dict[str, torch.Tensor | None], names: Sequence[str]) -> Attribution:
        """Solve for the weights over the tensors ``names``."""
        kept = [name for name in names if gradient.get(name) is not None and name in self.by_micro[0]]
        used = [index for index, tokens in enumerate(self.tokens) if tokens]
        target = torch.cat([gradient[name].double().reshape(-1) for name in kept])  # type: ignore[union-attr]
        columns = torch.stack([torch.cat([self.by_micro[i][name].reshape(-1) for name in kept]) for i in used], dim=1)
        found = torch.linalg.lstsq(columns, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        residual = (columns @ found - target).norm().item() / max(target.norm().item(), 1e-300)
        weights = [float("nan")] * len(self.tokens)
        for index, value in zip(used, found.tolist(), strict=True):
            weights[index] = value
        return Attribution(weights, self.places, self.tokens, residual)
