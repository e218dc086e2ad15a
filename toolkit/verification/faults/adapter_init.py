"""the adapter's special initialisation is lost."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class AdapterInit(Fault):
    id = "adapter-init"
    title = "the adapter's special initialisation is lost"
    reference = "peft#1887"
    stages = ("forward",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        from toolkit.training import session

        def add_adapter(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                model = right(*args, **kwargs)
                for name, matrix in model.named_parameters():
                    if "lora_A" in name:
                        nn.init.normal_(matrix, std=0.02)
                        self.reached()
                return model

            return wrong

        patch(session, "add_adapter", add_adapter)
