"""last, short window divided by the full accumulation count."""

from __future__ import annotations

from typing import ClassVar

from toolkit.verification.faults.helpers import WindowView, WrongWeight


class AccumPartialWindow(WrongWeight):
    id = "accum-partial-window"
    title = "last, short window divided by the full accumulation count"
    reference = "transformers#39659"
    stages = ("gradient",)
    needs: ClassVar = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def factor(self, view: WindowView) -> float:
        return len(view.window) / view.accumulation
