"""weights updated in bf16, without float32 masters."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import after_adamw


class MasterBf16(Fault):
    id = "master-bf16"
    title = "weights updated in bf16, without float32 masters"
    reference = "accelerate#2624, accelerate#3979"
    stages = ("engagement", "update")

    def inject(self, patch: Patch, case: Any) -> None:
        def round_weights(optimizer: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16())
                    self.reached()

        after_adamw(patch, round_weights)
