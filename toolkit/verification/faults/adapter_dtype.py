"""adapters in another dtype than the recipe says."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import TORCH_OPTIMIZER, Fault, Patch
from toolkit.verification.faults.helpers import LORA


class AdapterDtype(Fault):
    id = "adapter-dtype"
    title = "adapters in another dtype than the recipe says"
    reference = "peft#1706, DeepSpeed#8113"
    stages = ("engagement", "forward", "update")
    # DeepSpeed keeps float32 masters whatever dtype it is given: there the fault is none.
    strategies = TORCH_OPTIMIZER
    needs: ClassVar = {"adapter": LORA, "precision": "bf16"}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def set_dtypes(right: Any) -> Any:
            def wrong(model: Any, trainable: str, frozen: str) -> None:
                if trainable != frozen:
                    self.reached()
                right(model, frozen, frozen)

            return wrong

        patch(session, "set_dtypes", set_dtypes)
