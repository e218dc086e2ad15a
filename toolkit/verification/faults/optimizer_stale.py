"""the optimizer holds the parameters from before sharding."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import TORCH_OPTIMIZER, Fault, Patch
from toolkit.verification.faults.helpers import patch_engines


class OptimizerStale(Fault):
    id = "optimizer-stale"
    title = "the optimizer holds the parameters from before sharding"
    reference = "accelerate#2665, pytorch#149205"
    # In a first step of warm-up the right update is none: there the state that never comes is seen first.
    stages = ("update", "optimizer-state")
    strategies = TORCH_OPTIMIZER

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        def make_optimizer(right: Any) -> Any:
            def wrong(engine: Any, parameters: Any, decayed: Any) -> Any:
                self.reached()
                old = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
                return right(engine, old, decayed)

            return wrong

        patch_engines(patch, "_make_optimizer", make_optimizer)
