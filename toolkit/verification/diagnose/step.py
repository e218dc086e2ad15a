"""Causes of a wrong clip, update, optimizer state or learning rate, and of ranks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from toolkit.recipe.resolve import Resolved
from toolkit.reference.optimizers.muon import MatrixMuon, newton_schulz
from toolkit.reference.schedule import plain_learning_rate, plain_peak
from toolkit.rooms import shadows
from toolkit.verification.cases.case import Case
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass


def clip_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From the coefficients that were applied beside those that were right."""
    return clip_cause_of(stage, case.resolved().max_grad_norm, [step.norm for step in found.ranks[0].run.steps])


def clip_cause_of(stage: Stage, limit: float, seen_norms: Sequence[float]) -> Diagnosis | None:
    """``limit``: the norm that is asked for, 0 for none. ``seen_norms``: of each step, as it was reported."""
    wrong = [m for m in stage.wrong if m.kind == "coefficient"]
    norms = [m for m in stage.wrong if m.kind == "gradient-norm"]
    if not wrong:
        return None
    details = {"coefficient": wrong[0].sentence}
    if norms:
        if norms[0].facts["seen"] > norms[0].facts["expected"]:
            return None  # no part of a gradient has a larger norm
        return Diagnosis("norm-of-one-shard", details | {"norm": norms[0].sentence})
    applied = [(m.facts["seen"], m.facts["expected"]) for m in wrong]
    if limit <= 0:
        return Diagnosis("clips-by-default", details | {"limit": applied[0][0] * seen_norms[wrong[0].step]})
    if all(abs(seen - 1) < 1e-3 for seen, _ in applied):
        return Diagnosis("clipping-missing", details)
    if all(abs(seen - right * right) < 1e-3 * right for seen, right in applied):
        return Diagnosis("clips-two-times", details)
    return None


def update_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From what the weights did in place of the right update."""
    run = found.ranks[0].run
    step = measure.step
    measures = [m for m in stage.wrong if m.step == step]
    if {m.kind for m in measures} <= shadows().keys():
        facts = {"count": len(measures), "first": measures[0].name}
        return Diagnosis(shadows()[measures[0].kind].wrong, facts)
    before = run.weights_before(step)
    after = run.steps[step].weights
    wrong = [m.name for m in measures]
    resolved = case.resolved()
    settings = resolved.recipe.optimizer
    if all(torch.equal(before[name], after[name]) for name in wrong):
        return Diagnosis("other-parameters-updated", {"count": len(wrong), "what": "unchanged by the step",
                                                      "first": wrong[0]})  # fmt: skip
    if resolved.precision.trainable == "float32" and all(is_bf16(after[name]) for name in wrong):
        return Diagnosis("masters-missing", {"count": len(wrong)})
    if (cause := mistaken_step(found, measure, wrong)) is not None:
        return cause
    if (parts := _of_shards(found, resolved, step, wrong)) is not None:
        return Diagnosis("update-of-a-shard", {"count": len(wrong), "ranks": parts, "first": wrong[0]})
    lr = run.steps[step].lr[0] if run.steps[step].lr else 0.0
    if settings.weight_decay and lr and found.reference and not settings.groups:
        decayed = found.reference.decayed
        spared = [name for name in wrong if name not in decayed]
        if len(spared) == len(wrong):
            return Diagnosis("decays-spared-weights", {"count": len(wrong), "first": wrong[0]})
        if not spared:
            return Diagnosis("weight-decay-missing", {"count": len(wrong), "first": wrong[0]})
    return None


def _of_shards(found: Pass, resolved: Resolved, step: int, wrong: list[str]) -> int | None:
    """The number of shards whose own orthogonalised momenta the wrong changes are, each up to a factor; None if they
    are not."""
    run, reference = found.ranks[0].run, found.reference
    parts = resolved.world_size
    if reference is None or parts == 1:
        return None
    before = run if step == 0 else run.steps[step - 1]
    after = run.steps[step]
    for name in wrong:
        rule = reference.loop.rules[name]
        state, was = after.states[name], before.states[name]
        if not isinstance(rule.formula, MatrixMuon) or state is None:
            return None
        mu = rule.formula.momentum
        buffer = state.moments["momentum_buffer"].double()
        added = buffer if was is None else buffer - mu * was.moments["momentum_buffer"].double()
        update = added + mu * buffer if rule.formula.nesterov else buffer
        rate = after.rates.get(name, 0.0)
        change = after.weights[name].double() - (1 - rate * rule.weight_decay) * before.weights[name].double()
        for moved, part in zip(change.chunk(parts), update.chunk(parts), strict=True):
            if not rate or _cosine(-moved, newton_schulz(part, rule.formula.ns_steps).double()) < _SAME_DIRECTION:
                return None
    return parts


_SAME_DIRECTION = 0.99
"""Cosine of two orthogonalised matrices of the same input: bf16 turns them by less. Those of a shard and of the whole
have 0.97 at most (random matrices of 16 to 512 rows, 2 and 4 shards)."""


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-300)).item()


def state_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From the moments' values, and from which of them are missing."""
    wrong = [m for m in stage.wrong if m.step == measure.step]
    lost = [m.name for m in wrong if m.kind == "state-missing"]
    if lost and len(lost) == len(found.ranks[0].run.steps[measure.step].states):
        return Diagnosis("other-parameters-updated", {"count": len(lost), "what": "without optimizer state",
                                                      "first": lost[0]})  # fmt: skip
    states = found.ranks[0].run.steps[measure.step].states
    moments = [m for state in states.values() if state is not None for m in state.moments.values()]
    if moments and case.resolved().precision.trainable == "float32" and all(is_bf16(m) for m in moments):
        return Diagnosis("moments-in-bf16", {"count": len(moments)})
    if wrong and all(m.kind == "packed-moment" for m in wrong):
        return Diagnosis("moments-not-nearest", {"count": len(wrong), "first": wrong[0].tensor})
    return None


def schedule_cause(found: Pass, case: Case, stage: Stage, measure: Measure) -> Diagnosis | None:
    """From the update whose learning rate it would have been."""
    resolved = case.resolved()
    ignored = [m for m in stage.wrong if m.kind == "group-learning-rate"]
    rates = [m.facts["seen"].split(", ") for m in ignored]
    if ignored and all(len(seen) == 1 and abs(float(seen[0]) / m.facts["base"] - 1) < 1e-5
                       for seen, m in zip(rates, ignored, strict=True)):  # fmt: skip
        return Diagnosis("rate-of-a-group", {key: ignored[0].facts[key] for key in ("group", "seen", "expected")})
    updates = 0
    for taken in found.ranks[0].run.steps:
        right = plain_learning_rate(resolved, updates, case.steps)
        for lr in taken.lr:
            if abs(lr - right) <= 1e-9 * plain_peak(resolved):
                continue
            skips = taken.step - updates
            if skips and abs(lr - plain_learning_rate(resolved, taken.step, case.steps)) < 1e-9:
                return Diagnosis("scheduler-on-skipped-step", {"step": taken.step + 1})
            times = updates * resolved.world_size
            if updates and abs(lr - plain_learning_rate(resolved, times, case.steps)) < 1e-9:
                facts = {"times": resolved.world_size, "update": updates, "taken": times}
                return Diagnosis("scheduler-per-process", facts)
            rates = [plain_learning_rate(resolved, update, case.steps) for update in range(case.steps + 1)]
            others = [update for update, rate in enumerate(rates) if abs(lr - rate) < 1e-9]
            if others:
                facts = {"update": updates, "taken": others[0]}
                return Diagnosis("learning-rate-of-another-update", facts)
        updates += not taken.skipped
    return None


def rank_cause(stage: Stage, measure: Measure) -> Diagnosis:
    """From what ranks differ in first: whether they stepped, their gradients, or their weights."""
    skips = [m for m in stage.wrong if m.kind == "rank-value" and m.name == "skipped"]
    if skips and skips[0].step <= measure.step:
        return Diagnosis("skip-disagreement", {"step": skips[0].step + 1, "measure": skips[0].sentence})
    if measure.kind == "rank-gradient":
        return Diagnosis("rank-gradients-differ", {"first": measure.tensor})
    return Diagnosis("ranks-diverged", {"first": measure.tensor, "measure": measure.sentence})


def is_bf16(tensor: torch.Tensor) -> bool:
    """Whether 16 bits hold all its elements."""
    return torch.equal(tensor, tensor.bfloat16().to(tensor.dtype))


_ALMOST = 0.98
"""Fraction of the elements that are those of a mistaken step: float32 and the clipping coefficient decide how the
others are rounded. Of another mistake's elements a quarter or more differ."""


def mistaken_step(found: Pass, measure: Measure, wrong: list[str]) -> Diagnosis | None:
    """From the steps with the mistakes that the optimizer's formula knows: the first that nearly all elements are of.
    ``wrong``: names of weights."""
    if found.reference is None:
        return None
    run, loop = found.ranks[0].run, found.reference.loop
    before = run if measure.step == 0 else run.steps[measure.step - 1]
    taken = run.steps[measure.step]
    norm = sum(g.double().pow(2).sum().item() for g in taken.gradient.values() if g is not None) ** 0.5
    limit = loop.resolved.max_grad_norm
    coefficient = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
    updates = sum(not one.skipped for one in run.steps[: measure.step + 1])
    fitting, elements = Counter[str](), 0
    for name in wrong:
        rule, gradient, state = loop.rules[name], taken.gradient[name], before.states[name]
        if gradient is None:
            return None
        elements += gradient.numel()
        mistakes = rule.formula.mistakes(
            before.weights[name],
            gradient.double() * coefficient,
            None if state is None else state.moments,
            count=updates,
            lr=taken.rates.get(name, min(taken.lr, default=0.0)),
            weight_decay=rule.weight_decay,
        )
        for cause, after in mistakes:
            off = (taken.weights[name].double() - after.weight).abs()
            fitting[cause] += int((off <= (0.0 if after.slack is None else after.slack)).sum())
    facts = {"count": len(wrong), "first": wrong[0]}
    return next((Diagnosis(cause, facts) for cause, count in fitting.items() if count >= _ALMOST * elements), None)
