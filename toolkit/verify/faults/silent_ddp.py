"""the sharded strategy never engages: plain DDP runs instead."""

from __future__ import annotations

from typing import Any

from toolkit.verify.faults.base import Fault, Patch
from toolkit.verify.faults.helpers import replace_engine


class SilentDdp(Fault):
    id = "silent-ddp"
    title = "the sharded strategy never engages: plain DDP runs instead"
    reference = "accelerate 1.15.0 without a GPU"
    stages = ("engagement",)
    strategies = ("zero1", "zero2", "zero3", "fsdp1", "fsdp2")

    def inject(self, patch: Patch, case: Any) -> None:
        replace_engine(self, patch, "ddp")
