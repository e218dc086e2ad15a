"""a base weight trains under LoRA."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class BaseUnfrozen(Fault):
    id = "base-unfrozen"
    title = "a base weight trains under LoRA"
    stages = ("engagement", "update")
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def add_adapter(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                model = right(*args, **kwargs)
                base = next(p for name, p in model.named_parameters() if "base_layer" in name)
                base.requires_grad_(True)
                self.reached()
                return model

            return wrong

        patch(session, "add_adapter", add_adapter)
