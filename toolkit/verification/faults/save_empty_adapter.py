"""the saved adapter has a tensor without its values."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class SaveEmptyAdapter(Fault):
    id = "save-empty-adapter"
    title = "the saved adapter has a tensor without its values"
    reference = "trl#4416, peft#2450, peft#2892"
    stages = ("round-trip",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.training.tensor_folder import TensorWriter

        def add(right: Any) -> Any:
            def wrong(writer: Any, name: str, tensor: torch.Tensor) -> None:
                lost = name.endswith("lora_B.default.weight")
                if lost:
                    self.reached()
                right(writer, name, torch.zeros_like(tensor) if lost else tensor)

            return wrong

        patch(TensorWriter, "add", add)
