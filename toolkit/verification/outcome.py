"""The verdict on a recipe: from its passes to what is printed, written and returned as an exit status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.recipe.resolve import Resolved
from toolkit.strategies.engines.claims import Claim
from toolkit.verification.compare.backward import Deviation
from toolkit.verification.compare.measure import Measure, Stage, finite
from toolkit.verification.diagnose.diagnosis import Diagnosis
from toolkit.verification.passes import Pass

Verdict = Literal["equivalent", "different", "not-exercised", "failed-to-start"]


@dataclass
class Outcome:
    """Everything that `toolkit verify` found about one recipe."""

    resolved: Resolved
    twin: Resolved
    passes: list[Pass] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    """The likely cause of the first difference, or of what was not seen."""
    further: list[Diagnosis] = field(default_factory=list)
    """Likely causes of other stages that fail, which do not follow from the first."""
    notes: list[str] = field(default_factory=list)
    """What limits the comparison, beside the verdict."""

    @property
    def failure(self) -> str | None:
        return next((one.failure for one in self.passes if one.failure), None)

    @property
    def difference(self) -> tuple[Pass, Stage, Measure] | None:
        return next(iter(self.differences), None)

    @property
    def differences(self) -> list[tuple[Pass, Stage, Measure]]:
        """Every stage that fails, pass by pass; in each pass the first difference first."""
        return [(one, *found) for one in self.passes for found in one.differences]

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """Every likely cause, that of the first difference first."""
        return [*([self.diagnosis] if self.diagnosis else []), *self.further]

    @property
    def unproven(self) -> list[Claim]:
        return [claim for one in self.passes for claim in one.unproven]

    @property
    def verdict(self) -> Verdict:
        """A strategy that never engaged makes all numbers void; a number that is wrong is wrong all the same. A run
        that ended before it had a first loss has no number."""
        if any(one.failure and not one.started for one in self.passes):
            return "failed-to-start"
        if self.failure or (self.difference and not any(one.not_engaged for one in self.passes)):
            return "different"
        return "not-exercised" if self.unproven or not self.passes else "equivalent"

    @property
    def deviations(self) -> list[Deviation]:
        """With options that round: how far the plain loop's steps are from those without them."""
        return [one for found in self.passes if found.replayed for one in found.replayed.from_unrounded]

    @property
    def reorderings(self) -> list[Deviation]:
        """In 16 bits or fewer: how far steps in the candidate's order of operations (a fused loss, ZeRO-3) are from
        those in the plain loop's own. Both round correctly."""
        return [
            one
            for found in self.passes
            if found.replayed and found.name == "precision"
            for one in found.replayed.from_natural
        ]

    @property
    def comparisons(self) -> int:
        """How many values were compared."""
        return sum(len(stage.measures) for one in self.passes for stage in one.stages)

    @property
    def false_alarm_bound(self) -> float:
        """A bound on the chance that a right candidate is called different: of all comparisons whose tolerance is no
        bound itself, the sum (Bonferroni)."""
        return sum(measure.chance for one in self.passes for stage in one.stages for measure in stage.measures)

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict == "equivalent" else 1

    def fields(self) -> dict[str, Any]:
        """The contract's fields."""
        difference = self.difference
        return (
            {
                "verdict": self.verdict,
                "passes": [one.to_json() for one in self.passes],
                "engagement": [
                    {"pass": one.name, "id": c.id, "claim": c.claim, "expected": c.expected, "seen": c.seen, "ok": c.ok}
                    for one in self.passes
                    for c in one.claims
                ],
                "first_difference": _difference(*difference) if difference else None,
                "differences": [_difference(*found) for found in self.differences],
                "diagnosis": self.diagnosis.to_json() if self.diagnosis else None,
                "diagnoses": [one.to_json() for one in self.diagnoses],
                "failure": self.failure,
                "comparisons": self.comparisons,
                "false_alarm_bound": self.false_alarm_bound,
            }
            | self._deviation()
            | ({"notes": self.notes} if self.notes else {})
        )

    def _deviation(self) -> dict[str, Any]:
        found = {"deviation_from_bf16": self.deviations, "deviation_from_plain_order": self.reorderings}
        return {name: _worst(deviations) for name, deviations in found.items() if deviations}


def _worst(deviations: list[Deviation]) -> dict[str, Any]:
    worst = {"loss": max(one.loss for one in deviations), "gradient": max(one.gradient for one in deviations)}
    return {name: finite(value) for name, value in worst.items()} | {"steps": [one.to_json() for one in deviations]}


def _difference(one: Pass, stage: Stage, measure: Measure) -> dict[str, Any]:
    return {"pass": one.name, "stage": stage.name} | measure.to_json()
