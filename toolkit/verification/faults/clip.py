"""Gradients are clipped otherwise than the recipe says."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import SHARDED, Fault, Patch
from toolkit.verification.faults.helpers import limit_reaching_the_engine


class ClipDefault(Fault):
    id = "clip-default"
    title = "no clipping asked, yet the engine clips at its default"
    reference = "DeepSpeed#8068"
    stages = ("clip",)
    diagnoses = ("clips-by-default",)
    needs: ClassVar = {"optimizer": {"max_grad_norm": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        # DeepSpeed's default is 1.0; a twin with random weights may have smaller norms, which 0.1 clips.
        limit_reaching_the_engine(self, patch, 0.1)


class ClipIgnored(Fault):
    id = "clip-ignored"
    title = "the asked max_grad_norm never reaches the engine"
    reference = "axolotl#1381, accelerate#3807"
    stages = ("clip",)
    diagnoses = ("clipping-missing",)
    needs: ClassVar = {"optimizer": {"max_grad_norm": 1.0}}

    def inject(self, patch: Patch, case: Any) -> None:
        limit_reaching_the_engine(self, patch, 0.0)


class ClipLocalNorm(Fault):
    id = "clip-local-norm"
    title = "each rank clips by the norm of its own shard"
    reference = "pytorch FSDP: torch.nn.utils.clip_grad_norm_ over flat parameters"
    stages = ("clip",)
    diagnoses = ("norm-of-one-shard",)
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


class ClipTwice(Fault):
    id = "clip-twice"
    title = "clipped by the loop and by the engine"
    stages = ("clip",)
    diagnoses = ("clips-two-times",)
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
