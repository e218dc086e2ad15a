"""the optimizer's step count is not restored."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class ResumeStepLost(Fault):
    id = "resume-step-lost"
    title = "the optimizer's step count is not restored"
    reference = "DeepSpeed#4396"
    stages = ("round-trip",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import checkpoint

        def state(right: Any) -> Any:
            def wrong(step: int, moments: Any) -> Any:
                self.reached()
                return right(0, moments)

            return wrong

        patch(checkpoint, "OptimizerState", state)
