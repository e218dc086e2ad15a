"""How the moving average of the weights goes wrong, and what `verify` says of it."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.diagnose.known import Known
from toolkit.verification.faults.base import Fault, Patch


class ResumeAverageLost(Fault):
    id = "resume-average-lost"
    title = "the moving average of the weights is not restored by a resume"
    stages = ("round-trip",)
    diagnoses = ("average-not-restored",)
    needs: ClassVar = {"run": {"ema": {"decay": 0.9, "every": 1, "start": 0}}}

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        pure = resolved.recipe.precision == "bf16-pure"
        return cls.needs | ({"precision": "bf16"} if pure else {})

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import checkpoint

        @self.breaking(patch, checkpoint, "load")
        def load(right: Any, session: Any, folder: Any) -> Any:
            shadows, session.shadows = session.shadows, {}
            try:
                return right(session, folder)
            finally:
                session.shadows = shadows


FAULTS = (ResumeAverageLost,)
DIAGNOSES = {
    "average-wrong": Known(
        "the moving average of the weights is not what run.ema says", "{count} averages differ, first {first}"
    ),
    "average-not-restored": Known("the moving average of the weights is not restored", "{differing}"),
}
