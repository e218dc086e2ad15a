"""The learning rate is wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import DISTRIBUTED, TORCH_OPTIMIZER, Fault, Patch
from toolkit.verification.faults.helpers import patch_engines


class LrStepsOnSkip(Fault):
    id = "lr-steps-on-skip"
    title = "the scheduler advances on a step that overflow skipped"
    reference = "accelerate#4242"
    stages = ("schedule",)
    diagnoses = ("scheduler-on-skipped-step",)
    # DeepSpeed runs fp16 on a GPU only.
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = {"precision": "fp16", "schedule": {"name": "cosine"}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loop

        skips = 0

        def step(right: Any) -> Any:
            def noted(engine: Any, lr: float) -> Any:
                nonlocal skips
                taken = right(engine, lr)
                skips += taken.skipped
                return taken

            return noted

        @patch.replacing(loop, "learning_rate")
        def learning_rate(right: Any, schedule: Any, peak: float, update: int, warmup: int, total: int) -> float:
            if skips:
                self.reached()
            return right(schedule, peak, update + skips, warmup, total)

        patch_engines(patch, "step", step)


class LrStepsPerProcess(Fault):
    id = "lr-steps-per-process"
    title = "the scheduler advances once per process"
    reference = "accelerate#1398, accelerate#2142"
    stages = ("schedule",)
    diagnoses = ("scheduler-per-process",)
    strategies = DISTRIBUTED
    needs: ClassVar = {"schedule": {"name": "cosine"}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loop

        world = case.resolved().world_size

        @self.breaking(patch, loop, "learning_rate")
        def learning_rate(right: Any, schedule: Any, peak: float, update: int, warmup: int, total: int) -> float:
            return right(schedule, peak, update * world, warmup, total)
