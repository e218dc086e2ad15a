"""Clip, update, optimizer state and schedule: the optimizer's step, from the candidate's own gradient and state.

The coefficient that clipping really applied is read from a state tensor that is linear in the gradient, for example
Adam's first moment, which under every engine becomes ``beta1 * m + (1 - beta1) * coefficient * gradient``. Where the
optimizer has none (SGD without momentum, Adafactor), the step is compared with the coefficient that is right, so a
wrong one shows in the update or in the state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from toolkit.optim.adamw8bit import SIGNED
from toolkit.recipe.resolve import Resolved
from toolkit.reference.optimizers.base import After
from toolkit.reference.option import PlainOption
from toolkit.reference.rules import Rule, plain_rules
from toolkit.reference.schedule import plain_learning_rate, plain_peak
from toolkit.rooms import Option, shadowing_options
from toolkit.strategies.engines.base import OptimizerState
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import SAFETY, relative_error
from toolkit.verification.compare.packed import distance, half_cells
from toolkit.verification.compare.rounding import FEW, Fit, applied_coefficient, moment_bound, update_bound
from toolkit.verification.record.trace import RankTrace, StepTrace, Tensors

States = dict[str, OptimizerState | None]


def optimizer_stages(
    ranks: Sequence[RankTrace],
    resolved: Resolved,
    decayed: frozenset[str],
    total: int,
    overflow_step: int | None,
    begun: int = 0,
    matrices: frozenset[str] = frozenset(),
) -> list[Stage]:
    """The stages clip, update, optimizer-state and schedule. ``begun``: updates before the first of these steps.
    ``matrices``: the trained hidden matrices."""
    clip, update, state, schedule = Stage("clip"), Stage("update"), Stage("optimizer-state"), Stage("schedule")
    run = ranks[0].run
    weights, states = run.weights, run.states
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    warmup = resolved.recipe.schedule.warmup_steps or 0
    rules = plain_rules(resolved.recipe.optimizer, shapes, decayed, matrices, warmup)
    shadows = [(option, option.plain(settings)) for option, settings in shadowing_options(resolved.recipe)]
    clipped, updates, averages = [], begun, run.averages
    for taken in run.steps:
        forced = taken.step == overflow_step
        kind = "step-not-skipped" if forced else "step-skipped"
        schedule.measures.append(Measure(kind, taken.step, float(taken.skipped != forced), 0.0))
        schedule.measures += _rates(taken, resolved, rules, updates, total)
        if taken.skipped:
            _compare_unchanged(taken, weights, states, update, state)
        else:
            one = _OneStep(taken, weights, states, resolved, rules, updates)
            one.clip(clip)
            one.update(update)
            one.state(state)
            updates += 1
            if one.expected_coefficient < 1:
                clipped.append(taken.step + 1)
        for option, plain in shadows:
            update.measures += _shadow(taken, averages, option, plain, updates)
        averages = taken.averages or averages
        weights, states = taken.weights, taken.states
    if resolved.max_grad_norm > 0:
        numbers = ", ".join(map(str, clipped))
        clip.summary = f"clipped in step{'s' * (len(clipped) > 1)} {numbers}" if clipped else "no step clipped"
    else:
        clip.summary = "none asked"
    for stage in (clip, update, state):
        stage.detection_limit = max((m.tolerance for m in stage.measures if m.noise < 1), default=None)
    schedule.detection_limit = 1e-12
    return [clip, update, state, schedule]


def _rates(taken: StepTrace, resolved: Resolved, rules: dict[str, Rule], updates: int, total: int) -> list[Measure]:
    """The learning rate of the step, and of each group of the recipe."""
    right, peak = plain_learning_rate(resolved, updates, total), plain_peak(resolved)
    factors = {rule.group: rule.factor for rule in rules.values()}
    if set(factors) <= {None}:
        error = max((abs(lr - right) for lr in taken.lr), default=math.inf) / peak
        # Both are float64 formulas of the same line or cosine.
        facts = {"seen": ", ".join(f"{lr:.6g}" for lr in taken.lr), "expected": right}
        return [Measure("learning-rate", taken.step, error, 1e-12, facts=facts)]
    found = []
    for number, factor in sorted(factors.items(), key=lambda item: (item[0] is not None, item[0])):
        seen = sorted({taken.rates.get(name, math.inf) for name, rule in rules.items() if rule.group == number})
        error = max(abs(lr - right * factor) for lr in seen) / (peak * factor)
        shown = {"seen": ", ".join(f"{lr:.6g}" for lr in seen), "expected": right * factor}
        kind = "learning-rate" if number is None else "group-learning-rate"
        facts = shown if number is None else shown | {"group": number, "base": right}
        found.append(Measure(kind, taken.step, error, 1e-12, facts=facts))
    return found


def _shadow(taken: StepTrace, before: Tensors, option: Option, plain: PlainOption, updates: int) -> list[Measure]:
    """The change of what an option keeps of each weight, or that there is none where the step was skipped."""
    assert option.shadow is not None
    kind, measures = option.shadow.noun, []
    eps = torch.finfo(torch.float32).eps
    for name, weight in taken.weights.items():
        tensor = f"{name}.{option.name}"
        if taken.skipped or tensor not in taken.averages:
            missing = not taken.skipped
            measures.append(Measure(kind, taken.step, math.inf if missing else 0.0, 0.0, name))
            continue
        expected = plain.shadow(before[tensor], weight, updates)
        change = (expected - before[tensor].double()).norm().item()
        rounding = plain.roundings * eps * max(expected.norm().item(), weight.double().norm().item())
        error = (taken.averages[tensor].double() - expected).norm().item()
        scale = change or 1.0
        measures.append(Measure(kind, taken.step, error / scale, rounding / scale, name, eps))
    return measures


def _compare_unchanged(taken: StepTrace, weights: Tensors, states: States, update: Stage, state: Stage) -> None:
    for name, weight in taken.weights.items():
        same = torch.equal(weight, weights[name])
        update.measures.append(Measure("update-of-skipped-step", taken.step, float(not same), 0.0, name))
        before, after = states[name], taken.states[name]
        kept = (before is None) == (after is None)
        if before is not None and after is not None:
            kept = before.step == after.step and all(
                torch.equal(m, after.moments[k]) for k, m in before.moments.items()
            )
        state.measures.append(Measure("state-of-skipped-step", taken.step, float(not kept), 0.0, name))


class _OneStep:
    """One update held against float64, and against torch's own two implementations, whose rounding is the noise."""

    def __init__(
        self,
        taken: StepTrace,
        weights: Tensors,
        states: States,
        resolved: Resolved,
        rules: dict[str, Rule],
        updates: int,
    ) -> None:
        self.taken, self.weights, self.states = taken, weights, states
        self.limit = resolved.max_grad_norm
        self.rules, self.updates = rules, updates
        self.eps = torch.finfo(getattr(torch, resolved.precision.trainable)).eps
        self.gradients = {
            name: torch.zeros_like(weights[name]) if g is None else g for name, g in taken.gradient.items()
        }
        elements = sum(g.numel() for g in self.gradients.values())
        self.norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in self.gradients.values()))
        # Pairwise summation of n squares errs by at most log2(n) roundings (Higham, «Accuracy and Stability», 4.2). On
        # a CPU torch 2.13.0 adds the squares of a large tensor one after another: what that is off by is measured.
        summed = torch.nn.utils.get_total_norm(list(self.gradients.values())).item() if self.gradients else 0.0
        off = abs(summed - self.norm) / self.norm if self.norm and math.isfinite(summed) else 0.0
        self.rounding = max(math.log2(max(2, elements)) * self.eps, off)
        self.expected_coefficient = min(1.0, self.limit / (self.norm + 1e-6)) if self.limit > 0 else 1.0
        self.correct = self._correct_steps()
        self.fits = {name: self._fit([name], taken.states) for name in self.gradients}
        whole = self._fit(list(self.gradients), taken.states)
        self.whole = whole
        # Codes of 8 bits show the coefficient to a percent, their scales exactly: with the expected one, what is not
        # so is seen in the update and in the scales.
        packed = any(state is not None and state.scales for state in taken.states.values())
        # It is then not read but computed from a norm that is rounded itself: the root halves the sum's rounding.
        unread = packed or whole is None
        self.unread = self.rounding / 2 if unread and self.expected_coefficient < 1 else 0.0
        self.coefficient = applied_coefficient(None if packed else whole, self.expected_coefficient, self.rounding)
        self.right = {name: self._float64_step(name, self.coefficient) for name in self.gradients}
        # Torch's own steps were given the expected coefficient.
        self.right_expected = {name: self._float64_step(name, self.expected_coefficient) for name in self.gradients}

    def clip(self, stage: Stage) -> None:
        """The norm that was reported, and the coefficient that was applied, over all and by tensor."""
        step = self.taken.step
        error = abs(self.taken.norm - self.norm) / self.norm if self.norm else abs(self.taken.norm)
        facts = {"seen": self.taken.norm, "expected": self.norm}
        stage.measures.append(
            Measure("gradient-norm", step, error, SAFETY * self.rounding, noise=self.rounding, facts=facts)
        )
        fits = {"": (self.whole, list(self.gradients))}
        fits |= {name: (fit, [name]) for name, fit in self.fits.items()}
        for name, (fit, members) in fits.items():
            if fit is None:
                continue
            others = [self._fit(members, states) for _, states in self.correct]
            off = (abs(o.value - self.expected_coefficient) for o in others if o)
            noise = max(off, default=0.0) / self.expected_coefficient
            spread, chance = fit.spread
            noise = max(noise, spread / self.expected_coefficient / SAFETY, self.rounding)
            noise += self._packing(members) / self.expected_coefficient / SAFETY
            error = abs(fit.value - self.expected_coefficient) / self.expected_coefficient
            facts = {"seen": fit.value, "expected": self.expected_coefficient}
            kind = "tensor-coefficient" if name else "coefficient"
            stage.measures.append(Measure(kind, step, error, SAFETY * noise, name, noise, facts=facts, chance=chance))

    def update(self, stage: Stage) -> None:
        """The change of every weight."""
        for name, before in self.weights.items():
            right = self.right[name].weight.double() - before.double()
            exact = self.right_expected[name]
            noise = max(_off(w[name], before, exact) for w, _ in self.correct)
            noise = max(noise, self.eps) if noise != math.inf else math.inf
            error = _off(self.taken.weights[name], before, self.right[name])
            allowed = SAFETY * noise if noise != math.inf else 0.0
            if before.numel() < FEW:
                allowed = max(allowed, update_bound(before, right, self.eps))
            tolerance = allowed + self.unread if noise != math.inf else 0.0
            stage.measures.append(Measure("update", self.taken.step, error, tolerance, name, min(noise, 1e9)))

    def state(self, stage: Stage) -> None:
        """Every tensor of every weight's state, and the step count."""
        step = self.taken.step
        for name, after in self.taken.states.items():
            formula = self.rules[name].formula
            if not formula.keys:
                continue
            if after is None or set(after.moments) != set(formula.keys):
                stage.measures.append(Measure("state-missing", step, math.inf, 0.0, name))
                continue
            if formula.counts:
                off = abs(after.step - (self.updates + 1))
                counts = {"seen": after.step, "expected": self.updates + 1}
                stage.measures.append(Measure("step-count", step, off, 0.0, name, facts=counts))
            for key in formula.keys:
                right = self.right[name].moments[key]
                exact = self.right_expected[name].moments[key]
                noise = self.eps
                for _, states in self.correct:
                    other = states[name]
                    assert other is not None
                    noise = max(noise, min(relative_error(other.moments[key], exact), 1.0))
                if after.scales is None:
                    error = relative_error(after.moments[key], right)
                    which = {"moment": key}
                    limit = max(SAFETY * noise, moment_bound(self._terms(name, key), right, self.eps)) + 2 * self.unread
                    stage.measures.append(Measure("moment", step, error, limit, name, noise, facts=which))
                    continue
                # What the step computes is as near as ever; what it keeps is the code of that.
                outside, scales = distance(after.moments[key], after.scales[key], right, SIGNED[key])
                limit = SAFETY * noise + self.unread * (2 if key == "exp_avg_sq" else 1)  # its square
                for kind, error in (("packed-moment", outside), ("moment-scales", scales)):
                    stage.measures.append(Measure(kind, step, error, limit, name, noise, facts={"moment": key}))

    def _fit(self, names: list[str], states: States) -> Fit | None:
        """Least squares for c in ``what the state shows = gain c g``, and the deviation that its residual leaves."""
        across = along = bound = fourth = 0.0
        pairs = []
        for name in names:
            after, before, rule = states[name], self.states[name], self.rules[name]
            if after is None:
                continue
            shown = rule.formula.shown(
                self.weights[name],
                None if before is None else before.moments,
                after.moments,
                count=self.updates + 1,
                weight_decay=rule.weight_decay,
            )
            if shown is None:
                continue
            gradient = self.gradients[name].double()
            moved = shown.contribution / shown.gain
            across += (moved * gradient).sum().item()
            along += (gradient * gradient).sum().item()
            fourth += gradient.pow(4).sum().item()
            bound += (self._terms(name, shown.key) * gradient.abs()).sum().item() / shown.gain
            pairs.append((moved, gradient))
        if not along:
            return None
        value = across / along
        # Rounding grows with the element, so each residual counts with its own size (White, Econometrica 48, 1980).
        spread = sum(((moved - value * gradient) * gradient).pow(2).sum().item() for moved, gradient in pairs)
        bound *= 2 * self.eps
        return Fit(value, math.sqrt(spread) / along, bound / along, along * along / fourth if fourth else 0.0)

    def _terms(self, name: str, key: str) -> torch.Tensor:
        before, rule = self.states[name], self.rules[name]
        return rule.formula.terms(
            key,
            self.weights[name],
            self.gradients[name].double() * self.expected_coefficient,
            None if before is None else before.moments,
            count=self.updates + 1,
            weight_decay=rule.weight_decay,
        )

    def _packing(self, names: list[str]) -> float:
        """By how much rounding to codes can move the fitted coefficient: no element by more than half its cell."""
        moved = along = 0.0
        for name in names:
            after, gradient = self.taken.states[name], self.gradients[name].double()
            if after is not None and after.scales is not None:
                gain = 1 - self.rules[name].formula.betas[0]  # type: ignore[attr-defined]  # AdamW alone is packed
                cells = half_cells(after.moments["exp_avg"], after.scales["exp_avg"], signed=True)
                moved += (cells * gradient.abs()).sum().item() / gain
                along += gradient.pow(2).sum().item()
        return moved / along if along else 0.0

    def _rate(self, name: str) -> float:
        """The learning rate that the candidate used for a weight."""
        base = self.taken.lr[0] if self.taken.lr else 0.0
        return self.taken.rates.get(name, base)

    def _float64_step(self, name: str, coefficient: float) -> After:
        before, rule = self.states[name], self.rules[name]
        return rule.formula.step(
            self.weights[name],
            self.gradients[name].double() * coefficient,
            None if before is None else before.moments,
            count=self.updates + 1,
            lr=self._rate(name),
            weight_decay=rule.weight_decay,
            eps=self.eps,
        )

    def _correct_steps(self) -> list[tuple[Tensors, States]]:
        """The same step by correct implementations in the recipe's own dtype: rounded as such steps are."""
        found: list[tuple[Tensors, States]] = []
        for name, weight in self.weights.items():
            before, rule = self.states[name], self.rules[name]
            steps = rule.formula.correct(
                weight,
                (self.gradients[name] * self.expected_coefficient).to(weight.dtype),
                None if before is None else before.moments,
                count=self.updates + 1,
                lr=self._rate(name),
                weight_decay=rule.weight_decay,
            )
            for at, after in enumerate(steps):
                if at == len(found):
                    found.append(({}, {}))
                found[at][0][name] = after.weight
                found[at][1][name] = OptimizerState(self.updates + 1, after.moments)
        # A weight whose formula has fewer implementations than another's is there in all with its first.
        for weights, states in found:
            for name in self.weights:
                weights.setdefault(name, found[0][0][name])
                states.setdefault(name, found[0][1][name])
        return found


def _off(weight: torch.Tensor, before: torch.Tensor, right: After) -> float:
    """How far the change of a weight is from the right one, beyond what the formula leaves open; relative, 2-norm."""
    change, exact = weight.double() - before.double(), right.weight.double() - before.double()
    if right.slack is None:
        return relative_error(change, exact)
    beyond = ((change - exact).abs() - right.slack).clamp(min=0)
    return relative_error(exact + beyond, exact)
