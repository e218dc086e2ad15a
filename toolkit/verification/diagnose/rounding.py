"""Causes of weights that are rounded otherwise than `optimizer.rounding` says."""

from __future__ import annotations

from toolkit.reference.optimizers.adamw import AdamW
from toolkit.reference.optimizers.stochastic import StochasticAdamW
from toolkit.verification.compare.measure import Measure
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass

_ALMOST = 0.98
"""Fraction of a weight's elements that are what one way of rounding makes of the exact step: float32 and the clipping
coefficient decide of the others which way they go. Of another way's results a quarter differ."""


def rounding_cause(found: Pass, measure: Measure, wrong: list[str]) -> Diagnosis | None:
    """From the numbers next to the exact step, one of which each element should be. ``wrong``: names of weights."""
    if found.reference is None:
        return None
    run, loop = found.ranks[0].run, found.reference.loop
    before = run if measure.step == 0 else run.steps[measure.step - 1]
    taken = run.steps[measure.step]
    norm = sum(g.double().pow(2).sum().item() for g in taken.gradient.values() if g is not None) ** 0.5
    limit = loop.resolved.max_grad_norm
    coefficient = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
    updates = sum(not one.skipped for one in run.steps[: measure.step + 1])
    nearest = beside = elements = 0
    for name in wrong:
        rule, gradient, state = loop.rules[name], taken.gradient[name], before.states[name]
        if not isinstance(rule.formula, StochasticAdamW) or gradient is None:
            return None
        exact = AdamW(rule.formula.betas, rule.formula.eps).step(
            before.weights[name],
            gradient.double() * coefficient,
            None if state is None else state.moments,
            count=updates,
            lr=taken.rates.get(name, taken.lr[0]),
            weight_decay=rule.weight_decay,
        )
        right, after = exact.weight.bfloat16(), taken.weights[name].double()
        elements += after.numel()
        nearest += int((right == after).sum())
        # The two numbers beside the exact one are apart by at most an eps of it.
        beside += int(((after - exact.weight).abs() <= 2**-7 * exact.weight.abs()).sum())
    facts = {"count": len(wrong), "first": wrong[0]}
    if nearest >= _ALMOST * elements:
        return Diagnosis("nearest-not-stochastic", facts)
    return Diagnosis("rounded-by-other-bits", facts) if beside >= _ALMOST * elements else None
