"""no clipping asked, yet the engine clips at its default."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import limit_reaching_the_engine


class ClipDefault(Fault):
    id = "clip-default"
    title = "no clipping asked, yet the engine clips at its default"
    reference = "DeepSpeed#8068"
    stages = ("clip",)
    needs: ClassVar = {"optimizer": {"max_grad_norm": None}}

    def inject(self, patch: Patch, case: Any) -> None:
        # DeepSpeed's default is 1.0; a twin with random weights may have smaller norms, which 0.1 clips.
        limit_reaching_the_engine(self, patch, 0.1)
