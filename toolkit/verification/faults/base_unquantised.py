"""QLoRA's base stays in 16 bits."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import QLORA


class BaseUnquantised(Fault):
    id = "base-unquantised"
    title = "the base of QLoRA stays in 16 bits"
    stages = ("engagement",)
    needs: ClassVar = {"adapter": QLORA}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import session

        def quantise(right: Any) -> Any:
            def wrong(*args: Any) -> None:
                self.reached()

            return wrong

        patch(session, "quantise_base", quantise)
