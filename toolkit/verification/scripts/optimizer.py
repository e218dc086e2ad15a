"""Clip, update and optimizer state of a recorded command: each step of AdamW from its recorded gradient and state.

Every part of the formula is linear in something that was sketched, so nothing else is needed of the tensors: a moment
in the last one and the gradient (the second, in its squares), a weight in the last one and the direction that AdamW's
formula makes of the optimizer's own moments. What a right step may be off by is bounded: so many roundings of the terms
of each sum, in the dtype that they are kept in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import SAFETY
from toolkit.verification.record.trace import StepTrace
from toolkit.verification.scripts.facts import GroupFacts, ScriptFacts, Sketches, UnitTrace
from toolkit.verification.scripts.sketch import NORM_SLACK, distance, norm

_MOMENT = 5.0
"""Roundings of each term of a first moment: the gradient's by clipping, its product and that of the last moment, their
sum; as an interpolation two more, of the difference."""
_SQUARE = 7.0
"""... of a second moment: the gradient is rounded twice, being squared."""
_WEIGHT, _DIRECTION = 4.0, 8.0
"""... of a weight: the factor of its decay, that product, the sum; and of what is added to it: roots, quotients, the
bias corrections and the learning rate."""


def stages(unit: UnitTrace) -> tuple[list[Stage], list[str]]:
    """The stages, and what could not be compared, in words."""
    facts, run = unit.facts, unit.trace.run
    names, stateless = _with_state(unit)
    if not facts.adam or stateless or not names:
        why = "its step is not compared" if not facts.adam else "its state cannot be read"
        return [], [f"optimizer {facts.optimizer}: {why}; clip, update and optimizer-state are not seen"]
    notes = []
    if len(names) < len(run.weights):
        notes.append(
            f"{len(run.weights) - len(names)} tensors have no gradient at some steps; their updates are not seen"
        )
    groups = [(group, [name for name in group.names if name in names]) for group in facts.groups]
    clip, update, state = Stage("clip"), Stage("update"), Stage("optimizer-state")
    before, updates, clipped = unit.begun, next(iter(unit.begun.counts.values()), 0), []
    for taken, after in zip(run.steps, unit.sketches, strict=True):
        if taken.skipped:
            _compare_unchanged(taken.step, names, before, after, update, state)
        else:
            step = _Step(taken, updates, before, after, groups, facts, run.weights)
            step.clip(clip)
            step.states(state)
            step.weights(update)
            updates += 1
            if step.expected < 1:
                clipped.append(taken.step + 1)
        before = after
    if not facts.whole_clip and facts.limit > 0 and not facts.by_labels:
        clip.measures = []
        notes.append("clipping takes other gradients than those of this model; the clip stage is not seen")
    clip.summary = _summary(clipped) if facts.limit > 0 else "none asked"
    for stage in (clip, update, state):
        stage.detection_limit = max((m.tolerance for m in stage.measures if m.noise < 1), default=None)
    return [clip, update, state], notes


def _summary(clipped: Sequence[int]) -> str:
    numbers = ", ".join(map(str, clipped))
    return f"clipped in step{'s' * (len(clipped) > 1)} {numbers}" if clipped else "no step clipped"


def _with_state(unit: UnitTrace) -> tuple[set[str], bool]:
    """The parameters that every step updates, and whether one that has a gradient has no state that can be read."""
    names, stateless = set(unit.trace.run.weights), False
    for taken, sketches in zip(unit.trace.run.steps, unit.sketches, strict=True):
        if taken.skipped:
            continue
        for name in unit.trace.run.weights:
            if sketches.gradient.get(name) is None:
                names.discard(name)
            elif name not in sketches.moments:
                stateless = True
    return names, stateless


def _compare_unchanged(
    step: int, names: set[str], before: Sketches, after: Sketches, update: Stage, state: Stage
) -> None:
    for name in names:
        same = torch.equal(before.weights[name], after.weights[name])
        update.measures.append(Measure("update-of-skipped-step", step, float(not same), 0.0, name))
        old, new = before.moments.get(name, {}), after.moments.get(name, {})
        kept = old.keys() == new.keys() and before.counts.get(name) == after.counts.get(name)
        kept = kept and all(torch.equal(moment, new[key]) for key, moment in old.items())
        state.measures.append(Measure("state-of-skipped-step", step, float(not kept), 0.0, name))


@dataclass(frozen=True)
class _Fit:
    """A coefficient of the gradient, as the first moment shows it, and by how much rounding can move it."""

    value: float
    bound: float


class _Step:
    """One update, from sketches."""

    def __init__(
        self,
        taken: StepTrace,
        updates: int,
        before: Sketches,
        after: Sketches,
        groups: Sequence[tuple[GroupFacts, list[str]]],
        facts: ScriptFacts,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        self.step, self.norm_seen, self.updates = taken.step, taken.norm, updates
        self.before, self.after, self.groups, self.limit = before, after, groups, facts.limit
        self.eps = max(torch.finfo(weight.dtype).eps for weight in weights.values())
        self.moment_eps = torch.finfo(getattr(torch, after.moment_dtype)).eps
        self.norm, summed = (math.hypot(*norms) for norms in zip(*after.norms.values(), strict=True))
        # Pairwise summation of n squares errs by at most log2(n) roundings (Higham, «Accuracy and Stability of
        # Numerical Algorithms», 4.2). On a CPU torch 2.13.0 adds the squares of a large tensor one after another.
        pairwise = math.log2(max(2, sum(weight.numel() for weight in weights.values()))) * self.eps
        self.rounding = max(pairwise, abs(summed - self.norm) / self.norm if self.norm else 0.0)
        self.expected = min(1.0, self.limit / (self.norm + 1e-6)) if self.limit > 0 else 1.0
        self.fits = {name: self._fit([(group, [name])]) for group, names in groups for name in names}
        self.whole = self._fit(groups)
        off = abs(self.whole.value - self.expected)
        # The applied coefficient comes of a norm that is rounded itself. Where nothing is clipped it is 1, unless the
        # moments rule that out.
        free = self.expected == 1.0 and off <= self.whole.bound + self.rounding
        self.coefficient = 1.0 if free else self.whole.value
        self.unsure = 0.0 if free else self.whole.bound / max(abs(self.whole.value), 1e-300)

    def clip(self, stage: Stage) -> None:
        """The norm that was reported, and the coefficient that was applied, over all and by tensor."""
        if self.limit > 0:
            error = abs(self.norm_seen - self.norm) / self.norm if self.norm else abs(self.norm_seen)
            facts = {"seen": self.norm_seen, "expected": self.norm}
            tolerance = SAFETY * self.rounding
            stage.measures.append(
                Measure("gradient-norm", self.step, error, tolerance, noise=self.rounding, facts=facts)
            )
        for name, fit in {"": self.whole, **self.fits}.items():
            error = abs(fit.value - self.expected) / self.expected
            tolerance = fit.bound / self.expected + SAFETY * self.rounding
            facts = {"seen": fit.value, "expected": self.expected}
            kind = "tensor-coefficient" if name else "coefficient"
            stage.measures.append(Measure(kind, self.step, error, tolerance, name, tolerance / SAFETY, facts=facts))

    def states(self, stage: Stage) -> None:
        """Both moments of every weight, and the step count."""
        for group, names in self.groups:
            for name in names:
                seen, counted = self.after.counts[name], self.updates + 1
                counts = {"seen": seen, "expected": counted}
                stage.measures.append(Measure("step-count", self.step, abs(seen - counted), 0.0, name, facts=counts))
                beta1, beta2 = group.betas
                gradient, squares = self._gradient(name), self.after.squares[name]
                scale = self.coefficient
                self._moment(stage, name, "exp_avg", beta1, scale * gradient, _MOMENT, self.unsure)
                self._moment(stage, name, "exp_avg_sq", beta2, scale**2 * squares, _SQUARE, 2 * self.unsure)

    def _moment(
        self, stage: Stage, name: str, key: str, beta: float, added: torch.Tensor, roundings: float, unsure: float
    ) -> None:
        old, new = beta * self._old(name, key), (1 - beta) * added
        expected = old + new
        size = norm(expected)
        terms = norm(old) + norm(new)
        bound = (roundings * self.moment_eps / 2 * terms + unsure * norm(new)) * NORM_SLACK
        error = distance(self.after.moments[name][key], expected)
        tolerance = bound / size if size else 0.0
        facts = {"moment": key}
        stage.measures.append(Measure("moment", self.step, error, tolerance, name, tolerance / SAFETY, facts=facts))

    def weights(self, stage: Stage) -> None:
        """The change of every weight."""
        for group, names in self.groups:
            lr = group.lr[self.step]
            for name in names:
                old = self.before.weights[name]
                change = -lr * group.decay * old - lr * self.after.directions[name]
                size = norm(change)
                largest = max(norm(old), norm(self.after.weights[name]))
                roundings = _WEIGHT * largest + _DIRECTION * lr * norm(self.after.directions[name])
                bound = self.eps / 2 * roundings * NORM_SLACK
                error = distance(self.after.weights[name] - old, change)
                tolerance = bound / size if size else 0.0
                noise = min(tolerance / SAFETY, 1e9)
                stage.measures.append(Measure("update", self.step, error, tolerance, name, noise))

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self.after.gradient[name]
        assert gradient is not None  # of ``_with_state``
        return gradient

    def _old(self, name: str, key: str) -> torch.Tensor:
        moments = self.before.moments.get(name)
        return torch.zeros_like(self.after.moments[name][key]) if moments is None else moments[key]

    def _fit(self, groups: Sequence[tuple[GroupFacts, list[str]]]) -> _Fit:
        """Least squares for c in ``exp_avg - beta1 * its last = (1 - beta1) c g``."""
        across = along = off = 0.0
        for group, names in groups:
            beta, gain = group.betas[0], 1 - group.betas[0]
            for name in names:
                gradient, old = self._gradient(name), beta * self._old(name, "exp_avg")
                moved = (self.after.moments[name]["exp_avg"] - old) / gain
                across += float(moved @ gradient)
                along += float(gradient @ gradient)
                terms = norm(old) / gain + self.expected * norm(gradient)
                off += _MOMENT * self.moment_eps / 2 * terms * NORM_SLACK * norm(gradient)
        return _Fit(across / along, off / along) if along else _Fit(self.expected, 0.0)
