"""clipped by the loop and by the engine."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class ClipTwice(Fault):
    id = "clip-twice"
    title = "clipped by the loop and by the engine"
    stages = ("clip",)
    needs: ClassVar = {"optimizer": {"max_grad_norm": 1.0}}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        from toolkit.strategies.engines import base, fsdp1

        def clip(right: Any) -> Any:
            def wrong(engine: Any, max_norm: float) -> Any:
                norm = right(engine, max_norm)
                grads = [p.grad for p in engine.parameters.values() if p.grad is not None]
                whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                if whole > max_norm:
                    self.reached()
                    with torch.no_grad():
                        for grad in grads:
                            grad.mul_(max_norm / whole)
                return norm

            return wrong

        def unscale(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                self.reached()
                right(*args, **kwargs)
                return right(*args, **kwargs)

            return wrong

        patch(base.Engine, "clip", clip)
        patch(fsdp1.Fsdp1Engine, "clip", clip)
        patch(DeepSpeedZeroOptimizer, "unscale_and_clip_grads", unscale)
        patch(DeepSpeedZeroOptimizer_Stage3, "unscale_and_clip_grads", unscale)
