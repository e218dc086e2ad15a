"""the sharded strategy never engages: plain DDP runs instead."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import SHARDED, Fault, Patch
from toolkit.verification.faults.helpers import replace_engine


class SilentDdp(Fault):
    id = "silent-ddp"
    title = "the sharded strategy never engages: plain DDP runs instead"
    reference = "accelerate 1.15.0 without a GPU"
    stages = ("engagement",)
    strategies = SHARDED

    def inject(self, patch: Patch, case: Any) -> None:
        replace_engine(self, patch, "ddp")
