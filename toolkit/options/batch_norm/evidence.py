"""What `verify` says of running statistics, which it compares after every step."""

from __future__ import annotations

from toolkit.verification.compare.measure import Measure, Stage
from toolkit.verification.diagnose.diagnosis import Diagnosis

KINDS = {"running-statistic": ("{name}", "a running statistic of batch normalisation")}


def diagnose(stage: Stage, measure: Measure) -> Diagnosis | None:
    if any(m.kind not in KINDS for m in stage.wrong):
        return None
    return Diagnosis("running-statistics-differ", {"first": measure.tensor, "count": len(stage.wrong)})
