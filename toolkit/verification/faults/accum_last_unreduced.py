"""last micro-batch not reduced over ranks."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from toolkit.verification.faults.base import ALL_REDUCED, Fault, Patch


class AccumLastUnreduced(Fault):
    id = "accum-last-unreduced"
    title = "last micro-batch not reduced over ranks"
    reference = "DeepSpeed#7985"
    stages = ("gradient", "cross-rank")
    strategies = ALL_REDUCED
    needs: ClassVar = {"batch": {"accumulation": 3, "micro_size": 2, "global_size": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.strategies.engines.replicated import DdpEngine
        from toolkit.strategies.engines.zero import ZeroEngine

        def accumulating(right: Any) -> Any:
            def wrong(engine: Any, last: bool) -> Any:
                if last:
                    self.reached()
                return engine.accelerator.no_sync(engine.model) if last else contextlib.nullcontext()

            return wrong

        def backward(right: Any) -> Any:
            def wrong(engine: Any, loss: Any, last: bool) -> None:
                if not last:
                    return right(engine, loss, last)
                import deepspeed.comm

                unreduced = Patch()
                unreduced(deepspeed.comm, "all_reduce", lambda _: self._nothing)
                try:
                    return right(engine, loss, last)
                finally:
                    unreduced.undo()

            return wrong

        patch(DdpEngine, "accumulating", accumulating)
        patch(ZeroEngine, "backward", backward)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        self.reached()
