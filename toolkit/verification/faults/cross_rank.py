"""Ranks take different decisions."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import REPLICATED, Fault, Patch


class OverflowNotShared(Fault):
    id = "overflow-not-shared"
    title = "one rank skips a step, the others do not"
    reference = "DeepSpeed#7580"
    stages = ("cross-rank",)
    diagnoses = ("skip-disagreement",)
    strategies = REPLICATED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine, Step

        steps = 0

        @patch.replacing(Engine, "step")
        def step(right: Any, engine: Any, lr: float) -> Step:
            nonlocal steps
            steps += 1
            if engine.accelerator.process_index == 0 or steps != 2:
                return right(engine, lr)
            self.reached()
            norm = engine.clip(0.0)
            engine.optimizer.zero_grad()
            return Step(norm, skipped=True)
