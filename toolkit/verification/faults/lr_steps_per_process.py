"""the scheduler advances once per process."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch


class LrStepsPerProcess(Fault):
    id = "lr-steps-per-process"
    title = "the scheduler advances once per process"
    reference = "accelerate#1398, accelerate#2142"
    stages = ("schedule",)
    strategies = DISTRIBUTED
    needs: ClassVar = {"schedule": {"name": "cosine"}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loop

        world = case.resolved().world_size

        def learning_rate(right: Any) -> Any:
            def wrong(schedule: Any, peak: float, update: int, warmup: int, total: int) -> float:
                self.reached()
                return right(schedule, peak, update * world, warmup, total)

            return wrong

        patch(loop, "learning_rate", learning_rate)
