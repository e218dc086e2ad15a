"""a resumed run sees samples again."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class ResumeDataReplayed(Fault):
    id = "resume-data-replayed"
    title = "a resumed run sees samples again"
    stages = ("round-trip", "ledger")

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.data.loader import TrainLoader

        def begin(right: Any) -> Any:
            def wrong(loader: Any, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("start_window"):
                    self.reached()
                right(loader, *args, **(kwargs | {"start_window": 0}))

            return wrong

        patch(TrainLoader, "__init__", begin)
