"""activation checkpointing asked, never applied."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class CheckpointingOff(Fault):
    id = "checkpointing-off"
    title = "activation checkpointing asked, never applied"
    stages = ("engagement",)
    needs: ClassVar = {"activation_checkpointing": "full"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def checkpoint_blocks(right: Any) -> Any:
            def wrong(*arguments: Any) -> None:
                self.reached()

            return wrong

        patch(session, "checkpoint_blocks", checkpoint_blocks)
