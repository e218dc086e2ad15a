"""reentrant checkpointing with frozen embeddings: no gradients."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import WITHOUT_GRADIENT, Fault, Patch
from toolkit.verification.faults.helpers import LORA


class CheckpointNoGrad(Fault):
    id = "checkpoint-no-grad"
    title = "reentrant checkpointing with frozen embeddings: no gradients"
    reference = "transformers#26221, trl#3089"
    stages = ("gradient",)
    # DDP refuses by itself: parameters took no part in the loss.
    strategies = WITHOUT_GRADIENT
    # The head trains too, so that the backward has something to reach.
    needs: ClassVar = {"activation_checkpointing": "full", "adapter": LORA | {"modules_to_save": ["lm_head"]}}

    def inject(self, patch: Patch, case: Any) -> None:
        import functools

        from toolkit.model import checkpointing

        def checkpoint(right: Any) -> Any:
            def wrong(function: Any, *args: Any, **kwargs: Any) -> Any:
                self.reached()
                own = {"use_reentrant", "preserve_rng_state", "context_fn"}
                others = {key: value for key, value in kwargs.items() if key not in own}
                return right(functools.partial(function, **others), *args, use_reentrant=True)

            return wrong

        patch(checkpointing, "checkpoint", checkpoint)
