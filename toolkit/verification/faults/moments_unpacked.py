"""8-bit AdamW keeps its moments in float32."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import TORCH_OPTIMIZER, Fault, Patch

PACKED = {"optimizer": {"name": "adamw8bit", "kernel": "fused"}}


class MomentsUnpacked(Fault):
    id = "moments-unpacked"
    title = "8-bit moments are kept in float32"
    stages = ("engagement",)
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = PACKED

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.optim import adamw

        def make(right: Any) -> Any:
            def wrong(groups: Any, **options: Any) -> Any:
                self.reached()
                return torch.optim.AdamW(groups, **options)

            return wrong

        patch(adamw, "_in_8_bits", make)
