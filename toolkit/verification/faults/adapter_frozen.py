"""one adapter matrix never trains."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class AdapterFrozen(Fault):
    id = "adapter-frozen"
    title = "one adapter matrix never trains"
    stages = ("gradient", "update", "engagement")
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def add_adapter(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                model = right(*args, **kwargs)
                matrix = next(p for name, p in model.named_parameters() if "lora_B" in name)
                matrix.requires_grad_(False)
                self.reached()
                return model

            return wrong

        patch(session, "add_adapter", add_adapter)
