"""the asked max_grad_norm never reaches the engine."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import limit_reaching_the_engine


class ClipIgnored(Fault):
    id = "clip-ignored"
    title = "the asked max_grad_norm never reaches the engine"
    reference = "axolotl#1381, accelerate#3807"
    stages = ("clip",)
    needs: ClassVar = {"optimizer": {"max_grad_norm": 1.0}}

    def inject(self, patch: Patch, case: Any) -> None:
        limit_reaching_the_engine(self, patch, 0.0)
