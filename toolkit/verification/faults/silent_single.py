"""the processes never connect."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch
from toolkit.verification.faults.helpers import replace_engine


class SilentSingle(Fault):
    id = "silent-single"
    title = "the processes never connect"
    reference = "accelerate 1.15.0 without a GPU"
    stages = ("engagement", "gradient", "cross-rank")
    strategies = DISTRIBUTED

    def inject(self, patch: Patch, case: Any) -> None:
        replace_engine(self, patch, "single")
