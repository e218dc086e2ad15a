"""8-bit moments are cut off to the value below in place of being rounded."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import TORCH_OPTIMIZER, Fault, Patch
from toolkit.verification.faults.moments_unpacked import PACKED


class MomentsTruncated(Fault):
    id = "moments-truncated"
    title = "8-bit moments are cut off, not rounded"
    stages = ("optimizer-state",)
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = PACKED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.optim import adamw8bit

        def make(right: Any) -> Any:
            def wrong(signed: bool, device: Any) -> Any:
                values, _ = right(signed, device)
                self.reached()
                return values, values[1:]

            return wrong

        patch(adamw8bit, "_tensors", make)
