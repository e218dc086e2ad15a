"""gradients accumulated in bf16 where fp32 was asked."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class GradAccumBf16(Fault):
    id = "grad-accum-bf16"
    title = "gradients accumulated in bf16 where fp32 was asked"
    reference = "DeepSpeed#1800, DeepSpeed#2768"
    stages = ("engagement", "gradient")
    needs: ClassVar = {"precision": "bf16", "batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.strategies.engines.base import Engine
        from toolkit.strategies.zero import Zero1

        def backward(right: Any) -> Any:
            def wrong(engine: Any, loss: Any, last: bool) -> None:
                right(engine, loss, last)
                for parameter in engine.parameters.values():
                    if parameter.grad is not None:
                        self.reached()
                        with torch.no_grad():
                            parameter.grad.copy_(parameter.grad.bfloat16())

            return wrong

        def config(right: Any) -> Any:
            def wrong(strategy: Any, resolved: Any) -> Any:
                written = right(strategy, resolved)
                if resolved.precision.mixed:
                    self.reached()
                    written["data_types"] = {"grad_accum_dtype": "bf16"}
                return written

            return wrong

        patch(Engine, "backward", backward)
        patch(Zero1.__mro__[1], "deepspeed_config", config)
