"""weight decay on norms and biases where groups say not."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class DecayOnEverything(Fault):
    id = "decay-on-everything"
    title = "weight decay on norms and biases where groups say not"
    stages = ("update",)
    needs: ClassVar = {"optimizer": {"weight_decay": 0.1, "decay": "matrices"}, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def decayed_names(right: Any) -> Any:
            def wrong(model: Any, optimizer: Any) -> frozenset[str]:
                self.reached()
                return frozenset(name for name, p in model.named_parameters() if p.requires_grad)

            return wrong

        patch(session, "decayed_names", decayed_names)
