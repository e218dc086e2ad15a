"""One comparison, and a stage made of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.verification.compare.wording import label, sentence

STAGES = (
    "data",
    "ledger",
    "products",
    "forward",
    "gradient",
    "clip",
    "update",
    "optimizer-state",
    "schedule",
    "cross-rank",
    "round-trip",
)
"""In the order of a step, so that the first that fails is the first that is wrong."""


@dataclass(frozen=True)
class Measure:
    """``error`` of one quantity against its ``tolerance``, both relative unless the kind says otherwise.

    ``kind``: what was compared, a key of ``wording.KINDS``. ``step``, ``micro``, ``rank``: from 0. ``name``: the
    parameter or layer, if it is about one. ``noise``: by how much correct runs differ. ``facts``: what else was
    observed, for diagnoses and sentences. ``phase``: ``reloaded`` or ``resumed`` for what follows a checkpoint.
    ``chance``: the probability that a right value is beyond the tolerance; 0 where that is a bound.
    """

    kind: str
    step: int
    error: float
    tolerance: float
    name: str = ""
    noise: float = 0.0
    micro: int | None = None
    rank: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    phase: str = ""
    chance: float = 0.0

    @property
    def ok(self) -> bool:
        """False also where the error is not a number."""
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float:
        """Error in tolerances; infinite where something had to be exact and is not."""
        if self.error != self.error:
            return float("inf")
        return self.error / self.tolerance if self.tolerance > 0 else (0.0 if self.ok else float("inf"))

    @property
    def tensor(self) -> str:
        """What was compared, in words."""
        return label(self.kind, self.name, self.phase, self.facts)

    @property
    def sentence(self) -> str:
        """What was observed; empty where the error says it all."""
        return sentence(self.kind, self.name, self.facts)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "tensor": self.tensor,
            "step": self.step,
            "microstep": self.micro,
            "rank": self.rank,
            "error": finite(self.error),
            "tolerance": finite(self.tolerance),
            "noise": finite(self.noise),
            "said": self.sentence or None,
            "facts": {name: _plain(value) for name, value in self.facts.items()},
        }


@dataclass
class Stage:
    """All comparisons of one stage of one pass. ``summary``: what the screen shows where all agree."""

    name: str
    measures: list[Measure] = field(default_factory=list)
    detection_limit: float | None = None
    summary: str = ""

    @property
    def ok(self) -> bool:
        return all(measure.ok for measure in self.measures)

    @property
    def wrong(self) -> list[Measure]:
        """Comparisons beyond their tolerance."""
        return [measure for measure in self.measures if not measure.ok]

    @property
    def worst(self) -> Measure | None:
        return max(self.measures, key=lambda m: (m.ratio, m.error), default=None)

    @property
    def first_wrong(self) -> Measure | None:
        """The earliest step's worst: what happened after follows from it."""
        wrong = self.wrong
        if not wrong:
            return None
        step = min(measure.step for measure in wrong)
        return max((m for m in wrong if m.step == step), key=lambda m: (m.ratio, m.error))

    def to_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "stage": self.name,
            "ok": self.ok,
            "compared": len(self.measures),
            "wrong": len(self.wrong),
            "worst": worst.to_json() if worst else None,
            "detection_limit": self.detection_limit,
        }


def differences(stages: Sequence[Stage]) -> list[tuple[Stage, Measure]]:
    """Every stage that fails, with its first wrong comparison. The first of the list is where the run first went wrong:
    the earliest step, in it the earliest stage. What comes back from a checkpoint is compared after all else, whatever
    steps it is about."""
    wrong = [(stage, first) for stage in stages if (first := stage.first_wrong) is not None]
    return sorted(wrong, key=lambda pair: (pair[0].name == "round-trip", pair[1].step, STAGES.index(pair[0].name)))


def also(place: str, stage: Stage, measure: Measure, tensor: str) -> list[str]:
    """The lines of a verdict for a stage that fails beside the first. ``place``: pass or step; ``tensor``: what was
    compared, as the screen names it."""
    what = "; ".join(filter(None, (off_by(measure), measure.sentence)))
    return [
        f"also       at {stage.name}{place}: {tensor}",
        f"           {what}; {len(stage.wrong)} of {len(stage.measures)} comparisons fail in {stage.name}",
    ]


def off_by(measure: Measure) -> str:
    """The size of an error, in words."""
    return f"{measure.error:.1%} off" if 1e-3 < measure.error < 10 else f"off by {measure.error:.3g}"


def finite(value: float) -> float | str:
    """JSON has no infinity and no NaN: those are spelled."""
    return value if value - value == 0 else str(value)


def _plain(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value
