"""Clip, update and optimizer state of a recorded command: each step of AdamW from the recorded gradient and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from toolkit.verification.compare.measure import Stage
from toolkit.verification.compare.step import optimizer_stages
from toolkit.verification.record.trace import RankTrace, RunTrace
from toolkit.verification.scripts.facts import GroupFacts, ScriptFacts


def stages(ranks: Sequence[RankTrace], facts: ScriptFacts) -> tuple[list[Stage], list[str]]:
    """The stages, and what could not be compared, in words."""
    notes: list[str] = []
    run = ranks[0].run
    names, stateless = _with_state(ranks[0])
    if not facts.adam or stateless or not names:
        why = "its step is not compared" if not facts.adam else "its state cannot be read"
        notes.append(f"optimizer {facts.optimizer}: {why}; clip, update and optimizer-state are not seen")
        return [], notes
    groups = [replace(group, names=[name for name in group.names if name in names]) for group in facts.groups]
    groups = [group for group in groups if group.names]
    if len(names) < len(run.weights):
        notes.append(
            f"{len(run.weights) - len(names)} tensors have no gradient at some steps; their updates are not seen"
        )
    clip = _of(ranks[0], [name for group in groups for name in group.names], groups[0], facts.loop.limit)[0]
    coefficients = {m.step: m.facts["seen"] if m.facts["expected"] < 1 else 1.0 for m in clip.measures
                    if m.kind == "coefficient"}  # fmt: skip
    kept = {"gradient-norm", "coefficient", "tensor-coefficient"}
    if facts.loop.limit <= 0:
        kept.discard("gradient-norm")
    elif not facts.whole_clip:
        kept = set()
        notes.append("clipping takes other gradients than those of this model; the clip stage is not seen")
    clip.measures = [measure for measure in clip.measures if measure.kind in kept]
    update, state = Stage("update"), Stage("optimizer-state")
    clipped = _clipped(ranks[0], coefficients)
    for group in groups:
        _, one, two = _of(clipped, group.names, group, 0.0)
        update.measures += one.measures
        state.measures += two.measures
    for stage in (update, state):
        stage.detection_limit = max((m.tolerance for m in stage.measures if m.noise < 1), default=None)
    return [clip, update, state], notes


def _with_state(rank: RankTrace) -> tuple[set[str], bool]:
    """The parameters that every step updates, and whether one that has a gradient has no state that can be read."""
    names, stateless = set(rank.run.weights), False
    for step in rank.run.steps:
        for name, state in step.states.items():
            if not step.skipped and step.gradient.get(name) is None:
                names.discard(name)
            elif not step.skipped and state is None:
                stateless = True
    return names, stateless


def _clipped(rank: RankTrace, coefficients: dict[int, float]) -> RankTrace:
    """The same steps, with the gradients that clipping left: one group has its own norm, not that of all."""
    steps = [
        replace(
            step,
            gradient={name: None if g is None else g * coefficients.get(at, 1.0) for name, g in step.gradient.items()},
        )
        for at, step in enumerate(rank.run.steps)
    ]
    return replace(rank, run=replace(rank.run, steps=steps))


def _of(rank: RankTrace, names: list[str], group: GroupFacts, limit: float) -> tuple[Stage, Stage, Stage]:
    """The stages of some parameters, with the settings of one group; ``limit``: the norm that they are clipped to."""
    run = rank.run
    steps = [
        replace(
            step,
            step=at,
            weights={name: step.weights[name] for name in names},
            states={name: step.states[name] for name in names},
            gradient={name: step.gradient.get(name) for name in names} if step.gradient else {},
            lr=[group.lr[at]],
        )
        for at, step in enumerate(run.steps)
    ]
    weights = {name: run.weights[name] for name in names}
    part = RankTrace(0, run=RunTrace(weights, states={name: run.states[name] for name in names}, steps=steps))
    begun = next((state.step for state in run.states.values() if state is not None), 0)
    settings = SimpleNamespace(betas=group.betas, eps=group.eps, weight_decay=group.decay, lr=max(*group.lr, 1e-30))
    recorded: Any = SimpleNamespace(
        recipe=SimpleNamespace(optimizer=settings, schedule=SimpleNamespace(name="constant", warmup_steps=None)),
        max_grad_norm=limit,
        precision=SimpleNamespace(trainable=str(next(iter(weights.values())).dtype).removeprefix("torch.")),
        warmup=lambda total: 0,
    )
    clip, update, state, _ = optimizer_stages(
        [part], recorded, frozenset(names) if group.decay else frozenset(), len(steps), None, begun
    )
    return clip, update, state
