"""Clip, update, optimizer state and schedule: the optimizer's step, from the candidate's own gradient and state.

The coefficient that clipping really applied is read from Adam's first moment, which under every engine becomes
``beta1 * m + (1 - beta1) * coefficient * gradient``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from toolkit.optim.adamw8bit import SIGNED
from toolkit.recipe.resolve import Resolved
from toolkit.reference.adamw import AdamWStep, adamw_step
from toolkit.reference.schedule import plain_learning_rate
from toolkit.strategies.engines.base import OptimizerState
from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.compare.noise import SAFETY, relative_error
from toolkit.verification.compare.packed import distance, half_cells
from toolkit.verification.compare.rounding import FEW, Fit, moment_bound, terms, update_bound
from toolkit.verification.record.trace import RankTrace, StepTrace, Tensors

States = dict[str, OptimizerState | None]


def optimizer_stages(
    ranks: Sequence[RankTrace],
    resolved: Resolved,
    decayed: frozenset[str],
    total: int,
    overflow_step: int | None,
    begun: int = 0,
) -> list[Stage]:
    """The stages clip, update, optimizer-state and schedule. ``begun``: updates before the first of these steps."""
    clip, update, state, schedule = Stage("clip"), Stage("update"), Stage("optimizer-state"), Stage("schedule")
    run = ranks[0].run
    weights, states = run.weights, run.states
    clipped, updates = [], begun
    for taken in run.steps:
        forced = taken.step == overflow_step
        kind = "step-not-skipped" if forced else "step-skipped"
        schedule.measures.append(Measure(kind, taken.step, float(taken.skipped != forced), 0.0))
        schedule.measures.append(_lr(taken, resolved, updates, total))
        if taken.skipped:
            _compare_unchanged(taken, weights, states, update, state)
        else:
            one = _OneStep(taken, weights, states, resolved, decayed, updates)
            one.clip(clip)
            one.update(update)
            one.state(state)
            updates += 1
            if one.expected_coefficient < 1:
                clipped.append(taken.step + 1)
        weights, states = taken.weights, taken.states
    if resolved.max_grad_norm > 0:
        clip.summary = f"steps {', '.join(map(str, clipped))} clipped" if clipped else "no step clipped"
    else:
        clip.summary = "none asked"
    for stage in (clip, update, state):
        stage.detection_limit = max((m.tolerance for m in stage.measures if m.noise < 1), default=None)
    schedule.detection_limit = 1e-12
    return [clip, update, state, schedule]


def _lr(taken: StepTrace, resolved: Resolved, updates: int, total: int) -> Measure:
    right = plain_learning_rate(resolved, updates, total)
    peak = resolved.recipe.optimizer.lr
    error = max((abs(lr - right) for lr in taken.lr), default=math.inf) / peak
    # Both are float64 formulas of the same line or cosine.
    facts = {"seen": ", ".join(f"{lr:.6g}" for lr in taken.lr), "expected": right}
    return Measure("learning-rate", taken.step, error, 1e-12, facts=facts)


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
        decayed: frozenset[str],
        updates: int,
    ) -> None:
        self.taken, self.weights, self.states = taken, weights, states
        self.settings = resolved.recipe.optimizer
        self.limit = resolved.max_grad_norm
        self.decayed, self.updates = decayed, updates
        self.beta1 = self.settings.betas[0]
        self.eps = torch.finfo(getattr(torch, resolved.precision.trainable)).eps
        self.gradients = {
            name: torch.zeros_like(weights[name]) if g is None else g for name, g in taken.gradient.items()
        }
        elements = sum(g.numel() for g in self.gradients.values())
        self.norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in self.gradients.values()))
        # Pairwise summation of n squares errs by at most log2(n) roundings (Higham, «Accuracy and Stability», 4.2).
        self.rounding = math.log2(max(2, elements)) * self.eps
        self.expected_coefficient = min(1.0, self.limit / (self.norm + 1e-6)) if self.limit > 0 else 1.0
        self.lr = taken.lr[0] if taken.lr else 0.0
        self.correct = [self._torch_step(fused=fused) for fused in (False, True)]
        self.fits = {name: self._fit([name], taken.states) for name in self.gradients}
        whole = self._fit(list(self.gradients), taken.states)
        self.whole = whole
        # Codes of 8 bits show the coefficient to a percent, their scales exactly: with the expected one, what is not
        # so is seen in the update and in the scales.
        packed = any(state is not None and state.scales for state in taken.states.values())
        applied = self.expected_coefficient if whole is None or packed else whole.value
        # It is then not read but computed from a norm that is rounded itself: the root halves the sum's rounding.
        self.unread = self.rounding / 2 if packed and self.expected_coefficient < 1 else 0.0
        near_one = abs(applied - 1.0) <= self.rounding
        self.coefficient = 1.0 if near_one and self.expected_coefficient == 1.0 else applied
        self.right = {name: self._float64_step(name, self.coefficient) for name in self.gradients}
        # Torch's own steps were given the expected coefficient.
        self.right_expected = {name: self._float64_step(name, self.expected_coefficient) for name in self.gradients}

    def clip(self, stage: Stage) -> None:
        """The norm that was told, and the coefficient that was applied, over all and by tensor."""
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
            noise = max(abs(o.value - self.expected_coefficient) for o in others if o) / self.expected_coefficient
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
            right = self.right[name].weight - before.double()
            exact = self.right_expected[name].weight - before.double()
            noise = max(relative_error(w[name].double() - before.double(), exact) for w, _ in self.correct)
            noise = max(noise, self.eps) if noise != math.inf else math.inf
            error = relative_error(self.taken.weights[name].double() - before.double(), right)
            allowed = SAFETY * noise if noise != math.inf else 0.0
            if before.numel() < FEW:
                allowed = max(allowed, update_bound(before, right, self.eps))
            tolerance = allowed + self.unread if noise != math.inf else 0.0
            stage.measures.append(Measure("update", self.taken.step, error, tolerance, name, min(noise, 1e9)))

    def state(self, stage: Stage) -> None:
        """Both moments of every weight, and the step count."""
        step = self.taken.step
        for name, after in self.taken.states.items():
            if after is None:
                stage.measures.append(Measure("state-missing", step, math.inf, 0.0, name))
                continue
            off = abs(after.step - (self.updates + 1))
            counts = {"seen": after.step, "expected": self.updates + 1}
            stage.measures.append(Measure("step-count", step, off, 0.0, name, facts=counts))
            for key in ("exp_avg", "exp_avg_sq"):
                right = getattr(self.right[name], key)
                exact = getattr(self.right_expected[name], key)
                noise = self.eps
                for _, states in self.correct:
                    other = states[name]
                    assert other is not None
                    noise = max(noise, min(relative_error(other.moments[key], exact), 1.0))
                if after.scales is None:
                    error = relative_error(after.moments[key], right)
                    which = {"moment": key}
                    limit = max(SAFETY * noise, moment_bound(self._terms(name, key), right, self.eps))
                    stage.measures.append(Measure("moment", step, error, limit, name, noise, facts=which))
                    continue
                # What the step computes is as near as ever; what it keeps is the code of that.
                outside, scales = distance(after.moments[key], after.scales[key], right, SIGNED[key])
                limit = SAFETY * noise + self.unread * (2 if key == "exp_avg_sq" else 1)  # its square
                for kind, error in (("packed-moment", outside), ("moment-scales", scales)):
                    stage.measures.append(Measure(kind, step, error, limit, name, noise, facts={"moment": key}))

    def _fit(self, names: list[str], states: States) -> Fit | None:
        """Least squares for c in ``m' - beta1 m = (1 - beta1) c g``, and the deviation that its residual leaves."""
        across = along = bound = fourth = 0.0
        pairs = []
        for name in names:
            after, before = states[name], self.states[name]
            gradient = self.gradients[name].double()
            if after is None:
                continue
            moved = after.moments["exp_avg"].double()
            if before is not None:
                moved = moved - self.beta1 * before.moments["exp_avg"].double()
            moved = moved / (1 - self.beta1)
            across += (moved * gradient).sum().item()
            along += (gradient * gradient).sum().item()
            fourth += gradient.pow(4).sum().item()
            bound += (self._terms(name, "exp_avg") * gradient.abs()).sum().item()
            pairs.append((moved, gradient))
        if not along:
            return None
        value = across / along
        # Rounding grows with the element, so each residual counts with its own size (White, Econometrica 48, 1980).
        spread = sum(((moved - value * gradient) * gradient).pow(2).sum().item() for moved, gradient in pairs)
        bound *= 2 * self.eps / (1 - self.beta1)
        return Fit(value, math.sqrt(spread) / along, bound / along, along * along / fourth if fourth else 0.0)

    def _terms(self, name: str, key: str) -> torch.Tensor:
        beta1, beta2 = self.settings.betas
        gradient, before = self.gradients[name].double() * self.expected_coefficient, self.states[name]
        kept = None if before is None else before.moments[key]
        return terms(kept, gradient, beta1) if key == "exp_avg" else terms(kept, gradient * gradient, beta2)

    def _packing(self, names: list[str]) -> float:
        """By how much rounding to codes can move the fitted coefficient: no element by more than half its cell."""
        moved = along = 0.0
        for name in names:
            after, gradient = self.taken.states[name], self.gradients[name].double()
            if after is not None and after.scales is not None:
                cells = half_cells(after.moments["exp_avg"], after.scales["exp_avg"], signed=True)
                moved += (cells * gradient.abs()).sum().item()
                along += gradient.pow(2).sum().item()
        return moved / along / (1 - self.beta1) if along else 0.0

    def _float64_step(self, name: str, coefficient: float) -> AdamWStep:
        before = self.states[name]
        settings = self.settings
        return adamw_step(
            self.weights[name],
            self.gradients[name].double() * coefficient,
            None if before is None else before.moments["exp_avg"],
            None if before is None else before.moments["exp_avg_sq"],
            step=self.updates + 1,
            lr=self.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay if name in self.decayed else 0.0,
        )

    def _torch_step(self, *, fused: bool) -> tuple[Tensors, States]:
        """The same step by torch's AdamW in the recipe's own dtype: correct, and rounded as such steps are."""
        settings = self.settings
        weights = {name: weight.clone() for name, weight in self.weights.items()}
        optimizer = torch.optim.AdamW(
            [
                {"params": [w], "weight_decay": settings.weight_decay if name in self.decayed else 0.0}
                for name, w in weights.items()
            ],
            lr=self.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            fused=fused,
            foreach=False,
        )
        for name, weight in weights.items():
            weight.grad = (self.gradients[name] * self.expected_coefficient).to(weight.dtype)
            before = self.states[name]
            if before is not None:
                optimizer.state[weight] = {
                    "step": torch.tensor(float(self.updates)),
                    **{key: moment.to(weight.dtype).clone() for key, moment in before.moments.items()},
                }
        optimizer.step()
        states: States = {
            name: OptimizerState(self.updates + 1, {key: optimizer.state[w][key] for key in ("exp_avg", "exp_avg_sq")})
            for name, w in weights.items()
        }
        return weights, states
