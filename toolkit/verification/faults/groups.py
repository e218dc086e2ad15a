"""Parameter groups and whole matrices: what an optimizer has to know beyond its own shard."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import SHARDED_TENSORS, Fault, Patch


class GroupRateIgnored(Fault):
    id = "group-rate-ignored"
    title = "a parameter group's learning rate is overwritten by that of all others"
    stages = ("schedule",)
    diagnoses = ("rate-of-a-group",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        return {"optimizer": {"groups": [{"match": "weight$", "lr": 3 * resolved.recipe.optimizer.lr}]}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine

        @patch.replacing(Engine, "set_lr")
        def set_lr(right: Any, engine: Any, lr: float) -> None:
            right(engine, lr)
            for group in engine.optimizer.param_groups:
                if group["lr"] != lr:
                    self.reached()
                group["lr"] = lr


class MuonOfAShard(Fault):
    id = "muon-of-a-shard"
    title = "Muon orthogonalises each rank's shard instead of the whole matrix"
    stages = ("update",)
    diagnoses = ("update-of-a-shard",)
    strategies = SHARDED_TENSORS
    needs: ClassVar = {"optimizer": {"name": "muon"}}

    def inject(self, patch: Patch, case: Any) -> None:
        from torch.distributed.tensor import DTensor

        from toolkit.optim import muon

        @patch.replacing(muon, "orthogonalised")
        def orthogonalised(right: Any, update: Any, group: Any) -> Any:
            part = right(update.to_local(), group)
            spread = DTensor.from_local(
                part,
                update.device_mesh,
                update.placements,
                run_check=False,
                shape=update.shape,
                stride=update.stride(),
            )
            if part.numel() < update.numel():
                self.reached()
            return spread.full_tensor()
