"""loss averaged per micro-batch, not per supervised token."""

from __future__ import annotations

from typing import ClassVar

from toolkit.verification.faults.helpers import WindowView, WrongWeight


class AccumMeanOfMeans(WrongWeight):
    id = "accum-mean-of-means"
    title = "loss averaged per micro-batch, not per supervised token"
    reference = "trl#2175, transformers#34198"
    stages = ("gradient",)
    needs: ClassVar = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def factor(self, view: WindowView) -> float:
        return view.tokens / (max(1, view.micro.supervised) * len(view.window) * view.data_size)
