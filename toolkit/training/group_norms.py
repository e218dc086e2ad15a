"""``run.group_norms``: norms of the gradient, the update and the weights of each group of parameters.

Each rank sums the squares of the elements that it owns (engines/pieces.py), so that no tensor is gathered. The sums
of all ranks are added, on the device, when they are logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from toolkit.optim.groups import group_of
from toolkit.strategies.engines.base import Engine


class GroupNorms:
    """Call ``before`` and ``after`` around each optimizer step, on every rank."""

    def __init__(self, engine: Engine) -> None:
        optimizer = engine.resolved.recipe.optimizer
        self._engine = engine
        self._last = len(optimizer.groups)
        """Number of the group of all other parameters, which comes after the recipe's."""
        self._groups = {name: group_of(optimizer, name) for name in engine.shapes}
        self._gradients = torch.zeros(0)
        self._weights: list[tuple[str, torch.Tensor]] = []

    def before(self) -> None:
        """The window's gradient is complete and not clipped. Keeps a copy of the weights that this rank owns."""
        own = self._engine.own_gradient
        self._gradients = self._squares((name, one) for name in self._groups for _, one in own(name))
        self._weights = [(name, one.detach().clone()) for name, one in self._own_weights()]

    def after(self) -> torch.Tensor:
        """Sums of squares over this rank's elements by group, float32 (3, groups) on the device: of the gradient before
        clipping, of the update, and of the weights before it."""
        pairs = zip(self._own_weights(), self._weights, strict=True)
        changes = ((name, now.detach().float() - old.float()) for (name, now), (_, old) in pairs)
        sums = torch.stack([self._gradients, self._squares(changes), self._squares(self._weights)])
        self._weights = []
        return sums

    def _own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._groups:
            for _, one in self._engine.own_weight(name):
                yield name, one

    def _squares(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        sums = torch.zeros(self._last + 1, device=self._engine.device)
        for name, one in tensors:
            group = self._groups[name]
            norm = torch.linalg.vector_norm(one.detach(), dtype=torch.float32)
            sums[self._last if group is None else group] += norm.square().to(sums.device)
        return sums
