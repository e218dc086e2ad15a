"""the loss scale is left in the gradient."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class GradScaled65536(Fault):
    id = "grad-scaled-65536"
    title = "the loss scale is left in the gradient"
    reference = "DeepSpeed#7839"
    stages = ("gradient",)

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        # DeepSpeed runs fp16 on a GPU only.
        return {} if not resolved.traits.torch_optimizer and resolved.device == "cpu" else {"precision": "fp16"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.base import Engine
        from toolkit.strategies.engines.zero import ZeroEngine

        def unscale(right: Any) -> Any:
            def wrong(engine: Any) -> None:
                if engine.scaler is None:
                    right(engine)
                else:
                    self.reached()

            return wrong

        def backward(right: Any) -> Any:
            def wrong(engine: Any, loss: Any, last: bool) -> None:
                self.reached()
                right(engine, loss * 65536.0, last)

            return wrong

        patch(Engine, "unscale", unscale)
        patch(ZeroEngine, "backward", backward)
