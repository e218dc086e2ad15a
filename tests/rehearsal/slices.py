"""Where FSDP1's slices are on the other ranks, which are not like this one: a rank holds a run of a unit's elements.

The toolkit asks by a sum over ranks: for the slices of a parameter, and for the bytes of QLoRA's base. Here the answer
comes from FSDP's own layout of a flat parameter.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from toolkit.options.nf4 import evidence
from toolkit.strategies.engines.fsdp1 import Fsdp1Engine


def sizes(model: Any, parameter: torch.Tensor, world: int) -> list[int] | None:
    """How many elements of a parameter each rank holds; None where it is in no flat parameter."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        flat = unit._handle.flat_param if unit._handle is not None else None
        if flat is None or not any(parameter is other for other in flat._params):
            continue
        ends = list(accumulate(flat._numels_with_padding))
        spans = [(end - size, end) for end, size in zip(ends, flat._numels_with_padding, strict=True)]
        own = [span for span, padding in zip(spans, flat._is_padding_mask, strict=True) if not padding]
        at = next(i for i, other in enumerate(flat._params) if parameter is other)
        share, (first, last) = flat._sharded_size.numel(), own[at]
        return [max(0, min(last, (rank + 1) * share) - max(first, rank * share)) for rank in range(world)]
    return None


def install() -> None:
    """For the rest of this process. The collectives stay: only their answer is another."""
    asked, whole, state = Fsdp1Engine._sizes, Fsdp1Engine._whole, Fsdp1Engine.full_state

    def known_sizes(self: Any, local: torch.Tensor) -> list[int]:
        asked(self, local)
        by_identity = [name for name, parameter in self.parameters.items() if parameter is local]
        name = by_identity[0] if by_identity else self._rehearsed_name
        found = sizes(self.model, self.parameters[name], self.resolved.world_size)
        assert found is not None, f"{name} is in no unit"
        rank = self.accelerator.process_index
        assert found[rank] == local.numel(), f"{local.numel()} elements here, {found[rank]} by FSDP's layout"
        return found

    def of_name(self: Any, name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rehearsed_name = name
        return whole(self, name, *args, **kwargs)

    def of_all_ranks(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """A rank without an element of a parameter has no state of it; the others, which step alike, do."""
        parameter, of = self.parameters[name], self.optimizer.state
        stepped = [found["step"] for found in of.values() if "step" in found]
        if parameter.numel() == 0 and not of.get(parameter) and stepped:
            of[parameter] = {"step": stepped[0].clone()}
        return state(self, name, *args, **kwargs)

    claims, local_bytes = evidence.base_claims, evidence._local_bytes

    def base_claims(model: Any, bases: Any, resolved: Any, device: Any, blocks: Any = ()) -> Any:
        """The sum takes every rank for one like this, so each is given the mean of all of them."""

        def mean_bytes(parameter: torch.Tensor) -> float:
            found = sizes(model, parameter, resolved.world_size)
            if found is None:
                return local_bytes(parameter)
            return sum(found) * parameter.element_size() / resolved.world_size

        evidence._local_bytes = mean_bytes  # type: ignore[assignment]
        return claims(model, bases, resolved, device, blocks)

    evidence.base_claims = base_claims
    Fsdp1Engine._sizes = known_sizes  # type: ignore[method-assign]
    Fsdp1Engine._whole = of_name  # type: ignore[assignment, method-assign]
    Fsdp1Engine.full_state = of_all_ranks  # type: ignore[method-assign]
