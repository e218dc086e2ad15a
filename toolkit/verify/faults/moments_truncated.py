"""8-bit moments are cut off to the value below in place of being rounded."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verify.faults.base import FSDP, Fault, Patch
from toolkit.verify.faults.moments_unpacked import PACKED


class MomentsTruncated(Fault):
    id = "moments-truncated"
    title = "8-bit moments are cut off, not rounded"
    stages = ("optimizer-state",)
    strategies = ("single", "ddp", *FSDP)
    needs: ClassVar = PACKED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import adamw8bit

        def make(right: Any) -> Any:
            def wrong(signed: bool, device: Any) -> Any:
                values, _ = right(signed, device)
                self.reached()
                return values, values[1:]

            return wrong

        patch(adamw8bit, "_tensors", make)
