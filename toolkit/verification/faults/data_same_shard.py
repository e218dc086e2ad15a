"""every rank reads the same samples."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch


class DataSameShard(Fault):
    id = "data-same-shard"
    title = "every rank reads the same samples"
    stages = ("ledger",)
    strategies = DISTRIBUTED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        def deal(right: Any) -> Any:
            def wrong(window: list[Any], micro_size: int, data_size: int) -> Any:
                self.reached()
                return [[ranks[0]] * len(ranks) for ranks in right(window, micro_size, data_size)]

            return wrong

        patch(loader, "deal", deal)
