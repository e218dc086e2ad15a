"""gradient summed over micro-batches, not averaged."""

from __future__ import annotations

from typing import ClassVar

from toolkit.verification.faults.helpers import WindowView, WrongWeight


class AccumNoDivide(WrongWeight):
    id = "accum-no-divide"
    title = "gradient summed over micro-batches, not averaged"
    reference = "transformers#45305"
    stages = ("gradient",)
    needs: ClassVar = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def factor(self, view: WindowView) -> float:
        return float(view.accumulation)
