"""only the last micro-batch's gradient kept."""

from __future__ import annotations

from typing import ClassVar

from toolkit.verification.faults.helpers import WindowView, WrongWeight


class AccumLastOnly(WrongWeight):
    id = "accum-last-only"
    title = "only the last micro-batch's gradient kept"
    reference = "DeepSpeed#6550, DeepSpeed#7981"
    stages = ("gradient",)
    needs: ClassVar = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def factor(self, view: WindowView) -> float:
        return float(view.at == len(view.window) - 1)
