"""Claims: what a strategy or an option must be seen to do, and what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.errors import RunFailed


@dataclass(frozen=True)
class Claim:
    """One observable effect of an active strategy or option. ``id``: what diagnoses refer to. ``claim``: in words."""

    id: str
    claim: str
    expected: str
    seen: str
    ok: bool


class NotActive(RunFailed):
    """A strategy was set up and does not have its effects. ``claims``: those that failed."""

    def __init__(self, message: str, claims: Sequence[Claim]) -> None:
        super().__init__(message)
        self.claims = list(claims)


def connected_claim(world_size: int, device: torch.device) -> Claim:
    """Sum over all processes: evidence that they are connected, not only started."""
    import torch.distributed as dist

    seen = 1
    if dist.is_available() and dist.is_initialized():
        one = torch.ones((), device=device)
        dist.all_reduce(one)
        seen = int(one.item())
    return Claim("processes", "processes connected", str(world_size), str(seen), seen == world_size)
