"""What a formula is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class After:
    """A weight and its state after one step, in the dtype that was asked for.

    ``slack``: by how much each element of the weight may be off because the formula has a jump there, in the weight's
    units; None where it has none.
    """

    weight: torch.Tensor
    moments: dict[str, torch.Tensor]
    slack: torch.Tensor | None = None


@dataclass(frozen=True)
class Shown:
    """A state tensor that shows the clipped gradient: ``contribution / gain`` is that gradient."""

    key: str
    contribution: torch.Tensor
    gain: float


class Formula:
    """The step of one weight. A subclass is made from the recipe's section by ``of``."""

    keys: tuple[str, ...]
    """Tensors of the state."""
    counts: ClassVar[bool] = True
    """Whether the state has a count of steps."""

    @classmethod
    def of(cls, settings: Any, shape: tuple[int, ...], matrix: bool) -> Formula:
        """The formula of a weight of this ``shape``. ``matrix``: whether it is a hidden matrix."""
        raise NotImplementedError

    def warmed_up(self, updates: int) -> Formula:
        """The formula in a run whose first ``updates`` are a warm-up; the same unless the step depends on it."""
        return self

    def named(self, name: str) -> Formula:
        """The formula of the weight of that name; the same unless the step depends on it."""
        return self

    def mistakes(self, *before: Any, **settings: Any) -> list[tuple[str, After]]:
        """What known mistakes make of the step: for each an id of the optimizer's ``diagnoses``, and the result. Takes
        what ``step`` takes."""
        return []

    def step(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Tensors | None,
        *,
        count: int,
        lr: float,
        weight_decay: float,
        eps: float = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> After:
        """One step. ``gradient``: after clipping. ``state``: before the step, None before the first. ``count``: of this
        step, from 1. ``eps``: of the dtype that the candidate computes in, for ``slack``. ``dtype``: computed in."""
        raise NotImplementedError

    def shown(
        self, weight: torch.Tensor, before: Tensors | None, after: Tensors, *, count: int, weight_decay: float
    ) -> Shown | None:
        """What of the state after the step shows the clipped gradient, linearly; None if nothing does."""
        return None

    def terms(
        self, key: str, weight: torch.Tensor, gradient: torch.Tensor, before: Tensors | None, *, count: int,
        weight_decay: float,
    ) -> torch.Tensor:  # fmt: skip
        """The absolute values that a state tensor is the sum of, element by element, float64: an error of each term by
        its rounding is allowed. ``gradient``: after clipping."""
        raise NotImplementedError

    def correct(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        state: Tensors | None,
        *,
        count: int,
        lr: float,
        weight_decay: float,
    ) -> Iterator[After]:
        """The same step by correct implementations in the weight's own dtype: rounded as such steps are."""
        raise NotImplementedError


def by_torch(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any] | None,
    keys: tuple[str, ...],
) -> After:  # fmt: skip
    """One step of a torch optimizer over ``weight``, which it was made with."""
    weight.grad = gradient.to(weight.dtype)
    if state is not None:
        optimizer.state[weight] = dict(state)
    optimizer.step()
    return After(weight, {key: optimizer.state[weight][key] for key in keys})


def own(state: Tensors | None, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
    """A copy of the state that an optimizer may change."""
    return None if state is None else {key: tensor.to(dtype).clone() for key, tensor in state.items()}


def terms(before: torch.Tensor | None, added: torch.Tensor, beta: float, gain: float | None = None) -> torch.Tensor:
    """The absolute values that a moment is the sum of, element by element, float64: ``beta`` times the moment
    ``before``, and ``gain`` (default 1 - ``beta``) times what the step adds."""
    new = (1 - beta if gain is None else gain) * added.double().abs()
    return new if before is None else beta * before.double().abs() + new
