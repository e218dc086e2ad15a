"""parameter groups collapsed into one, without decay."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class DecayLost(Fault):
    id = "decay-lost"
    title = "parameter groups collapsed into one, without decay"
    reference = "peft#3503"
    stages = ("update",)
    needs: ClassVar = {"optimizer": {"weight_decay": 0.1, "decay": "matrices"}, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def decayed_names(right: Any) -> Any:
            def wrong(model: Any, optimizer: Any) -> frozenset[str]:
                self.reached()
                return frozenset()

            return wrong

        patch(session, "decayed_names", decayed_names)
