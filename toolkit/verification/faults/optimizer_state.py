"""The optimizer's moments are wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import TORCH_OPTIMIZER, Fault, Patch
from toolkit.verification.faults.helpers import after_adamw

PACKED = {"optimizer": {"name": "adamw8bit", "kernel": "fused"}}


class MomentsTruncated(Fault):
    id = "moments-truncated"
    title = "8-bit moments are cut off, not rounded"
    stages = ("optimizer-state",)
    diagnoses = ("moments-not-nearest",)
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = PACKED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.optim import adamw8bit

        @patch.replacing(adamw8bit, "_tensors")
        def make(right: Any, signed: bool, device: Any) -> Any:
            values, _ = right(signed, device)
            self.reached()
            return values, values[1:]


class MomentsUnpacked(Fault):
    id = "moments-unpacked"
    title = "8-bit moments are kept in float32"
    stages = ("engagement",)
    diagnoses = ("wrong-dtype",)
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = PACKED

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.optim import adamw8bit

        @self.breaking(patch, adamw8bit, "build")
        def make(right: Any, groups: Any, optimizer: Any, *, fused: bool) -> Any:
            return torch.optim.AdamW(groups, lr=optimizer.lr, betas=tuple(optimizer.betas), eps=optimizer.eps)


class OptimizerBf16State(Fault):
    id = "optimizer-bf16-state"
    title = "Adam's moments kept in bf16"
    reference = "AReaL#1292"
    stages = ("optimizer-state",)
    diagnoses = ("moments-in-bf16",)

    def inject(self, patch: Patch, case: Any) -> None:
        def round_state(optimizer: Any) -> None:
            for state in optimizer.state.values():
                for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                    state[key].copy_(state[key].bfloat16())
                    self.reached()

        after_adamw(patch, round_state)
