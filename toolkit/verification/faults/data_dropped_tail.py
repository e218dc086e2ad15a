"""the remainder batch is never trained on."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class DataDroppedTail(Fault):
    id = "data-dropped-tail"
    title = "the remainder batch is never trained on"
    stages = ("ledger",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data import loader

        def windows(right: Any) -> Any:
            def wrong(order: Any, global_size: int) -> Any:
                for window in right(order, global_size):
                    if len(window) == global_size:
                        yield window
                    else:
                        self.reached()

            return wrong

        patch(loader, "windows", windows)
