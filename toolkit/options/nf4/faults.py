"""How a base in 4 bits goes wrong: not packed, or unpacked with other statistics."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.diagnose.known import MISSING, Known
from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA

QLORA = LORA | {"method": "qlora"}


class BaseStatistics(Fault):
    id = "base-statistics"
    title = "4-bit weights are unpacked with other statistics than they were packed with"
    reference = "bitsandbytes 0.50.2 on a CPU with AVX-512, rows that are no multiple of 64 long"
    stages = ("forward",)
    diagnoses = ("base-unpacked-wrong",)
    needs: ClassVar = {"adapter": QLORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.options.nf4 import apply

        @patch.replacing(apply, "quantise_base")
        def quantise(right: Any, model: Any, *rest: Any) -> None:
            from toolkit.model.packed_layers import packed_layers

            right(model, *rest)
            for layer in packed_layers(model).values():
                layer.statistics.absmax = layer.statistics.absmax.roll(1)
                self.reached()


class BaseUnquantised(Fault):
    id = "base-unquantised"
    title = "the base of QLoRA stays in 16 bits"
    stages = ("engagement",)
    diagnoses = ("base-not-quantised",)
    needs: ClassVar = {"adapter": QLORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.options.nf4 import apply

        @self.breaking(patch, apply, "quantise_base")
        def quantise(right: Any, *args: Any) -> None:
            pass


FAULTS = (BaseStatistics, BaseUnquantised)
DIAGNOSES = {"base-not-quantised": Known("the base weights are not in 4 bits", MISSING)}
