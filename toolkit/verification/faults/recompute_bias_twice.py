"""recomputation adds a bias twice: a kept product was changed in place."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import GATHERED_BY_DEEPSPEED, Fault, Patch


class RecomputeBiasTwice(Fault):
    id = "recompute-bias-twice"
    title = "recomputation adds a bias twice: a kept product was changed in place"
    reference = "deepspeed 0.19.8, runtime/zero/linear.py; torch 2.13.0, selective checkpointing"
    stages = ("gradient",)
    strategies = GATHERED_BY_DEEPSPEED
    # Linear layers with a bias, whose first value is not what it comes to be.
    needs: ClassVar = {"activation_checkpointing": "selective", "model": {"config": {"attention_bias": True}}}

    def inject(self, patch: Patch, case: Any) -> None:
        import functools
        import importlib

        from deepspeed.runtime.zero import linear
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        from toolkit.model import checkpointing
        from toolkit.strategies.engines import zero

        def keep_products(right: Any) -> Any:
            def wrong() -> Any:
                self.reached()
                return create_selective_checkpoint_contexts(checkpointing.keep_costly)

            return functools.wraps(right)(wrong)

        def round_once(right: Any) -> Any:
            return lambda: importlib.reload(linear)  # DeepSpeed's own again

        patch(checkpointing, "keep_products", keep_products)
        patch(zero, "_round_once", round_once)
