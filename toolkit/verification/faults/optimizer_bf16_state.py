"""Adam's moments kept in bf16."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import after_adamw


class OptimizerBf16State(Fault):
    id = "optimizer-bf16-state"
    title = "Adam's moments kept in bf16"
    reference = "AReaL#1292"
    stages = ("optimizer-state",)

    def inject(self, patch: Patch, case: Any) -> None:
        def round_state(optimizer: Any) -> None:
            for state in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].bfloat16())
                    self.reached()

        after_adamw(patch, round_state)
