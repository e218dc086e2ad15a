"""Sketches of a step's tensors, made of each as it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from toolkit.strategies.engines.base import OptimizerState
from toolkit.verification.record.fingerprint import fingerprint
from toolkit.verification.scripts.facts import GroupFacts, Sketches
from toolkit.verification.scripts.sketch import sketch, sketch_of

_HALVES = (torch.bfloat16, torch.float16)


class Sketching:
    """What one rank keeps of the tensors of a step: rank 0 their sketches, the others that they took part."""

    def __init__(self, main: bool, groups: Mapping[str, GroupFacts]) -> None:
        """``groups``: by trained tensor the settings of its group, where the optimizer is AdamW."""
        self.main, self.groups = main, groups
        self.sketches = Sketches()
        self.digests: dict[str, str] = {}

    def weight(self, spill: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Sketches a weight. What is given back is what ``spill`` makes of it, which keeps it whole."""

        def keep(name: str, value: torch.Tensor) -> torch.Tensor:
            if not self.main:
                return torch.empty(0)
            self.sketches.weights[name] = sketch(value)
            return spill(name, value)

        return keep

    def gradient(self, scale: float, alone: bool) -> Callable[[str, torch.Tensor | None], None]:
        """``scale``: the loss scale that is still in it, or 0. ``alone``: there is no other rank to compare with."""

        def keep(name: str, value: torch.Tensor | None) -> None:
            value = value / scale if scale and value is not None else value
            self.digests[name] = "none" if value is None else "" if alone else fingerprint(value)
            if not self.main:
                return
            sketches = self.sketches
            if value is None:
                sketches.gradient[name] = None
                return
            sketches.gradient[name] = sketch(value)
            flat = value.reshape(-1)
            sketches.squares[name] = sketch_of(flat.numel(), lambda begin, end: flat[begin:end].double().square_())
            exact, summed = torch.linalg.vector_norm(value, dtype=torch.float64), torch.linalg.vector_norm(value)
            sketches.norms[name] = float(exact), float(summed)
            sketches.rounded[name] = [str(d).removeprefix("torch.") for d in _HALVES if _has_all(d, value)]

        return keep

    def state(self, name: str, state: OptimizerState | None) -> None:
        if not self.main or state is None:
            return
        sketches = self.sketches
        sketches.counts[name] = state.step
        sketches.moments[name] = {key: sketch(moment) for key, moment in state.moments.items()}
        sketches.moment_dtype = str(next(iter(state.moments.values())).dtype).removeprefix("torch.")
        if (group := self.groups.get(name)) is not None:
            sketches.directions[name] = _direction(state, group)


def _direction(state: OptimizerState, group: GroupFacts) -> torch.Tensor:
    """The sketch of AdamW's step from its own moments (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2)."""
    beta1, beta2 = group.betas
    first, second = (state.moments[key].reshape(-1) for key in ("exp_avg", "exp_avg_sq"))

    def read(begin: int, end: int) -> torch.Tensor:
        root = second[begin:end].double().div_(1 - beta2**state.step).sqrt_().add_(group.eps)
        return first[begin:end].double().div_(1 - beta1**state.step).div_(root)

    return sketch_of(first.numel(), read)


def _has_all(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Whether all elements are numbers of ``dtype``: 16-bit sums leave such ones. Asked of a few first."""
    flat = values.reshape(-1)
    few = flat[:1024]
    return bool(torch.equal(few, few.to(dtype).to(few.dtype))) and bool(
        torch.equal(flat, flat.to(dtype).to(flat.dtype))
    )
