"""the sampler pads the last batch with samples seen before."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class DataDuplicated(Fault):
    id = "data-duplicated"
    title = "the sampler pads the last batch with samples seen before"
    reference = "accelerate#2316"
    stages = ("ledger",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        def deal(right: Any) -> Any:
            def wrong(window: list[Any], micro_size: int, data_size: int) -> Any:
                short = -len(window) % (micro_size * data_size)
                if short:
                    self.reached()
                return right([*window, *window[:short]], micro_size, data_size)

            return wrong

        patch(loader, "deal", deal)
