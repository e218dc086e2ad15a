"""Runs random mutations through verify; see toolkit/verification/faults/mutation.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.launch.group import WorkerGroup
from toolkit.recipe.resolve import Resolved
from toolkit.verification.faults.mutation import KINDS
from toolkit.verification.outcome import Outcome
from toolkit.verification.run import verify


@dataclass(frozen=True)
class Mutant:
    """One mutation and what became of it. ``limit``: above which relative error it has to be found."""

    kind: str
    size: float
    strategy: str
    killed: bool
    stage: str
    limit: float
    changed: bool
    """Whether it did anything: nothing small enough to drop, or no digit to round away, is no mutation."""

    @property
    def must_die(self) -> bool:
        """A batch, a delay and a transposition have no size of their own."""
        what, how = self.kind.split()
        return self.changed and (what == "label" or how in ("delay", "transpose") or self.size > self.limit)


def mutate(
    resolved: Resolved, group: WorkerGroup, count: int, seed: int, tell: Callable[[Mutant], None] = lambda _: None
) -> list[Mutant]:
    """Run ``count`` random mutations of sizes from 1e-8 to 1."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        kind, size = draw.choice(KINDS), 10 ** draw.uniform(-8, 0)
        options = {"kind": kind, "size": size, "seed": draw.randrange(2**31)}
        outcome = verify(resolved, group=group, mutation=options, round_trip=False, stop_early=True, time_limit=120)
        limit = _limit(outcome, kind)
        stage = outcome.difference[1].name if outcome.difference else ""
        mutant = Mutant(kind, size, resolved.recipe.strategy.name, outcome.exit_code != 0, stage, limit,
                        outcome.passes[0].fault_reached)  # fmt: skip
        tell(mutant)
        found.append(mutant)
    return found


def _limit(outcome: Outcome, kind: str) -> float:
    stage = {"gradient": "gradient", "moment": "optimizer-state", "weight": "update", "label": "ledger"}[
        kind.split()[0]
    ]
    limits = [s.detection_limit for s in outcome.passes[0].stages if s.name == stage]
    return max((limit for limit in limits if limit), default=0.0)
