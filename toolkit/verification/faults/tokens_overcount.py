"""the token count includes the never-predicted first position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.data.collate import MicroBatch
from toolkit.verification.faults.base import Fault, Patch


class TokensOvercount(Fault):
    id = "tokens-overcount"
    title = "the token count includes the never-predicted first position"
    reference = "transformers#46204"
    stages = ("gradient",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.loader import TrainLoader
        from toolkit.training import loop

        rows = 0

        def windows(iterate: Any) -> Any:
            def wrong(loader: Any) -> Iterator[list[MicroBatch]]:
                nonlocal rows
                for window in iterate(loader):
                    rows = sum(len(micro.sample_ids) for micro in window)
                    yield window

            return wrong

        def overcount(total: Any) -> Any:
            def sum_over_ranks(tensor: Any) -> Any:
                self.reached()
                return total(tensor + rows)

            return sum_over_ranks

        patch(TrainLoader, "__iter__", windows)
        patch(loop, "sum_over_ranks", overcount)
