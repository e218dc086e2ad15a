"""recompute in checkpointing draws new dropout masks."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import DROPPING


class DropoutRedrawn(Fault):
    id = "dropout-redrawn"
    title = "recompute in checkpointing draws new dropout masks"
    reference = "accelerate 1.15.0 FSDP2 (preserve_rng_state=False), OLMo-core#828"
    stages = ("gradient",)
    needs: ClassVar = {"activation_checkpointing": "full", "adapter": DROPPING}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.model import checkpointing

        def checkpoint(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                self.reached()
                return right(*args, **(kwargs | {"preserve_rng_state": False}))

            return wrong

        patch(checkpointing, "checkpoint", checkpoint)
