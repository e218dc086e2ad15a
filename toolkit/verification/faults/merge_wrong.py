"""Merged weights answer differently from the live adapter."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class MergeWrong(Fault):
    id = "merge-wrong"
    title = "merged weights answer differently from the live adapter"
    reference = "peft#2025, peft#2803"
    stages = ("round-trip",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from peft.tuners.lora.layer import Linear

        def delta(right: Any) -> Any:
            def wrong(layer: Any, adapter: str) -> Any:
                self.reached()
                return right(layer, adapter) * 0.5

            return wrong

        patch(Linear, "get_delta_weight", delta)
