"""ranks weighted equally although their token counts differ."""

from __future__ import annotations

from toolkit.verify.faults.base import SPREAD
from toolkit.verify.faults.helpers import WindowView, WrongWeight


class AccumRankMean(WrongWeight):
    id = "accum-rank-mean"
    title = "ranks weighted equally although their token counts differ"
    reference = "transformers#34242, transformers#39392"
    stages = ("gradient",)
    strategies = SPREAD

    def factor(self, view: WindowView) -> float:
        return view.tokens / (max(1, view.local_tokens) * view.world_size)
