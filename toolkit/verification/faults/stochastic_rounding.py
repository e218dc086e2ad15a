"""`optimizer.rounding: stochastic`: results are rounded in another way."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import SHARDED, Fault, Patch

_STOCHASTIC = {
    "precision": "bf16-pure",
    "optimizer": {"name": "adamw", "kernel": "fused", "rounding": "stochastic"},
    "strategy": {"mesh": None, "offload": "none"},
    "options": None,
}


class _OtherRounding(Fault):
    stages = ("update",)
    needs: ClassVar = _STOCHASTIC


class RoundedToNearest(_OtherRounding):
    id = "rounded-to-nearest"
    title = "weights and moments are rounded to nearest although the recipe asks for stochastic rounding"
    diagnoses = ("nearest-not-stochastic",)

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.optim import stochastic

        @patch.replacing(stochastic, "_rounded")
        def rounded(right: Any, values: Any, bits: Any) -> Any:
            return values.to(torch.bfloat16)

        # What is compiled already has the right rounding.
        @self.breaking(patch, stochastic, "_kernel")
        def kernel(right: Any) -> Any:
            return stochastic._adamw


class BitsByRank(_OtherRounding):
    id = "bits-by-rank"
    title = "random bits are counted from the beginning of each rank's shard"
    diagnoses = ("rounded-by-other-bits",)
    strategies = SHARDED

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.optim import stochastic

        @patch.replacing(stochastic, "_key")
        def key(right: Any, name: str, step: int, first: int) -> Any:
            if first:
                self.reached()
            return right(name, step, 0)


class BitsOfOneStep(_OtherRounding):
    id = "bits-of-one-step"
    title = "random bits are the same in every step"
    diagnoses = ("rounded-by-other-bits",)

    def inject(self, patch: Patch, case: Any) -> None:
        from toolkit.optim import stochastic

        @patch.replacing(stochastic, "_key")
        def key(right: Any, name: str, step: int, first: int) -> Any:
            if step > 1:
                self.reached()
            return right(name, 1, first)
