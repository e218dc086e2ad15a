"""ranks weighted equally although their token counts differ."""

from __future__ import annotations

from toolkit.verification.faults.base import DISTRIBUTED
from toolkit.verification.faults.helpers import WindowView, WrongWeight


class AccumRankMean(WrongWeight):
    id = "accum-rank-mean"
    title = "ranks weighted equally although their token counts differ"
    reference = "transformers#34242, transformers#39392"
    stages = ("gradient",)
    strategies = DISTRIBUTED

    def factor(self, view: WindowView) -> float:
        return view.tokens / (max(1, view.local_tokens) * view.data_size)
