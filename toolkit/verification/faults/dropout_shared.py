"""every rank draws the same dropout mask."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import DISTRIBUTED, Fault, Patch
from toolkit.verification.faults.helpers import DROPPING


class DropoutShared(Fault):
    id = "dropout-shared"
    title = "every rank draws the same dropout mask"
    reference = "transformers#31412"
    # The other ranks' losses differ as soon as their masks do.
    stages = ("forward", "gradient")
    strategies = DISTRIBUTED
    needs: ClassVar = {"adapter": DROPPING}

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.training import loop

        def seed_micro_batch(right: Any) -> Any:
            def wrong(seed: int, step: int, micro: int, rank: int) -> None:
                if rank:
                    self.reached()
                right(seed, step, micro, 0)

            return wrong

        patch(loop, "seed_micro_batch", seed_micro_batch)
