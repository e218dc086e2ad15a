"""one bucket of gradients is never reduced."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import ALL_REDUCED, Fault, Patch


class GradBucketSkipped(Fault):
    id = "grad-bucket-skipped"
    title = "one bucket of gradients is never reduced"
    reference = "DeepSpeed#4321"
    stages = ("gradient", "cross-rank")
    strategies = ALL_REDUCED

    def inject(self, patch: Patch, case: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from toolkit.strategies.engines.replicated import DdpEngine
        from toolkit.strategies.engines.zero import ZeroEngine

        def wrap(right: Any) -> Any:
            def wrong(engine: Any, model: Any) -> Any:
                left_out = next(name for name, p in model.named_parameters() if p.requires_grad)
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [left_out])
                self.reached()
                return right(engine, model)

            return wrong

        def backward(right: Any) -> Any:
            def wrong(engine: Any, loss: Any, last: bool) -> None:
                import deepspeed.comm

                once = Patch()
                once(deepspeed.comm, "all_reduce", lambda reduce: self._but_the_first(reduce))
                try:
                    right(engine, loss, last)
                finally:
                    once.undo()

            return wrong

        patch(DdpEngine, "wrap", wrap)
        patch(ZeroEngine, "backward", backward)

    def _but_the_first(self, reduce: Any) -> Any:
        skipped = False

        def wrong(*args: Any, **kwargs: Any) -> Any:
            nonlocal skipped
            if skipped:
                return reduce(*args, **kwargs)
            skipped = True
            self.reached()
            return None

        return wrong
