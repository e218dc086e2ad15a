"""loss divided by the accumulation count twice."""

from __future__ import annotations

from typing import ClassVar

from toolkit.verification.faults.helpers import WindowView, WrongWeight


class AccumDoubleDivide(WrongWeight):
    id = "accum-double-divide"
    title = "loss divided by the accumulation count twice"
    reference = "transformers#35808, accelerate#3533"
    stages = ("gradient",)
    needs: ClassVar = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def factor(self, view: WindowView) -> float:
        return 1.0 / view.accumulation
