"""the saved weights are the bf16 copy of float32 masters."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class SaveStale(Fault):
    id = "save-stale"
    title = "the saved weights are the bf16 copy of float32 masters"
    stages = ("round-trip",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training.tensor_folder import TensorWriter

        def add(right: Any) -> Any:
            def wrong(writer: Any, name: str, tensor: Any) -> None:
                self.reached()
                right(writer, name, tensor.bfloat16().to(tensor.dtype))

            return wrong

        patch(TensorWriter, "add", add)
