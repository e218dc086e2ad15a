"""4-bit weights are unpacked with the statistics of other blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import QLORA


class BaseStatistics(Fault):
    id = "base-statistics"
    title = "4-bit weights are unpacked with other statistics than they were packed with"
    reference = "bitsandbytes 0.50.2 on a CPU with AVX-512, rows that are no multiple of 64 long"
    stages = ("forward",)
    needs: ClassVar = {"adapter": QLORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def quantise(right: Any) -> Any:
            def wrong(model: Any, *rest: Any) -> None:
                from toolkit.model.nf4 import nf4_layers

                right(model, *rest)
                for layer in nf4_layers(model).values():
                    layer.statistics.absmax = layer.statistics.absmax.roll(1)
                    self.reached()

            return wrong

        patch(session, "quantise_base", quantise)
