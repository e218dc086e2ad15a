"""each rank clips by the norm of its own shard."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import SHARDED, Fault, Patch


class ClipLocalNorm(Fault):
    id = "clip-local-norm"
    title = "each rank clips by the norm of its own shard"
    reference = "pytorch FSDP: torch.nn.utils.clip_grad_norm_ over flat parameters"
    stages = ("clip",)
    strategies = SHARDED
    needs: ClassVar = {"optimizer": {"max_grad_norm": 1.0}}

    def inject(self, patch: Patch, case: Any) -> None:
        import deepspeed.comm
        import torch
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        from toolkit.strategies.engines.fsdp1 import Fsdp1Engine
        from toolkit.strategies.engines.fsdp2 import Fsdp2Engine

        def clip(right: Any) -> Any:
            def wrong(engine: Any, max_norm: float) -> Any:
                self.reached()
                grads = [p.grad for p in engine.parameters.values() if p.grad is not None]
                local = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
                norm = torch.nn.utils.get_total_norm([g for g in local if g.numel()])
                factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
                for grad in local:
                    grad.mul_(factor)
                return norm

            return wrong

        def norm(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                self.reached()
                alone = Patch()
                alone(deepspeed.comm, "all_reduce", lambda _: lambda *a, **k: None)
                try:
                    return right(*args, **kwargs)
                finally:
                    alone.undo()

            return wrong

        patch(Fsdp1Engine, "clip", clip)
        patch(Fsdp2Engine, "clip", clip)
        patch(DeepSpeedZeroOptimizer, "get_grad_norm_direct", norm)
        patch(DeepSpeedZeroOptimizer_Stage3, "get_grad_norm_direct", norm)
