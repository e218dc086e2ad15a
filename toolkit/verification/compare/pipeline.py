"""Evidence that micro-batches pass through the stages of a pipeline: what each rank did, sent and received, and how
long it would wait if every forward and every backward took the same time."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.verification.record.trace import RankTrace

Action = tuple[str, int]


def schedule_claims(ranks: Sequence[RankTrace], resolved: Resolved) -> list[Claim]:
    """Of the first step; none without a pipeline."""
    stages, micros = resolved.mesh.pipeline, resolved.accumulation
    if stages == 1:
        return []
    every = sorted((what, micro) for what in ("forward", "backward") for micro in range(micros))
    odd = next((rank for rank in ranks if sorted(map(tuple, rank.actions)) != every), None)
    shown = ranks[0] if odd is None else odd
    claims = [
        Claim(
            "schedule", f"forwards and backwards of rank {shown.rank} in the first step", f"{micros} of each, once",
            _counted(shown.actions), odd is None,
        )
    ]  # fmt: skip
    claims.append(_exchanged(ranks, resolved, micros))
    if odd is None:
        pipeline = [ranks[rank].actions for rank in resolved.mesh.stage_ranks(0)]
        slots = idle_slots(pipeline)
        right = 2 * (stages - 1)
        observed = "none: each waits for another" if slots is None else f"{slots} of {2 * micros + slots}"
        expected = f"{right} of {2 * micros + right}"
        claims.append(Claim("bubble", "idle slots of each stage in a step", expected, observed, slots == right))
    return claims


def _counted(actions: Sequence[Action]) -> str:
    return ", ".join(f"{len({m for what, m in actions if what == kind})} {kind}s" for kind in ("forward", "backward"))


def _exchanged(ranks: Sequence[RankTrace], resolved: Resolved, micros: int) -> Claim:
    """A tensor each way for every micro-batch and neighbour."""
    stages = resolved.mesh.pipeline
    kinds = ("hidden states sent", "hidden states received", "gradients sent", "gradients received")

    def right(rank: RankTrace) -> dict[str, int]:
        stage = resolved.mesh.stage(rank.rank)
        after, before = micros * (stage < stages - 1), micros * (stage > 0)
        return dict(zip(kinds, (after, before, before, after), strict=True))

    def describe(counts: dict[str, int]) -> str:
        return ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in kinds)

    odd = next((r for r in ranks if {kind: r.exchanged.get(kind, 0) for kind in kinds} != right(r)), None)
    shown = ranks[0] if odd is None else odd
    return Claim("stage-exchanges", f"exchanges of rank {shown.rank} in the first step", describe(right(shown)),
                 describe(shown.exchanged), odd is None)  # fmt: skip


def idle_slots(stages: Sequence[Sequence[Action]]) -> int | None:
    """How many slots the stages wait in a window in which each of their ``stages`` (actions, in order) takes one slot
    and needs what its neighbour makes: a forward that of the stage before, a backward that of the stage after. The
    window begins with the first action and ends with the last. None where they wait for each other."""
    done: dict[tuple[int, str, int], int] = {}
    left: list[list[Action]] = [[(what, micro) for what, micro in actions] for actions in stages]
    free = [0] * len(stages)
    while any(left):
        moved = False
        for stage, actions in enumerate(left):
            if not actions:
                continue
            what, micro = actions[0]
            other = stage - 1 if what == "forward" else stage + 1
            needs = done.get((other, what, micro)) if 0 <= other < len(stages) else 0
            if needs is None:
                continue
            free[stage] = done[stage, what, micro] = max(free[stage], needs) + 1
            actions.pop(0)
            moved = True
        if not moved:
            return None
    return max(free) - len(stages[0])
