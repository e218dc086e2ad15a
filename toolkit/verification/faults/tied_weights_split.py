"""embedding and head are no longer tied."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class TiedWeightsSplit(Fault):
    id = "tied-weights-split"
    title = "embedding and head are no longer tied"
    reference = "verl#7834, lingua#75"
    stages = ("gradient", "engagement")

    @classmethod
    def needs_of(cls, resolved: Any) -> dict[str, Any]:
        return {"adapter": None, "model": {"config": dict(resolved.facts.config or {}) | {"tie_word_embeddings": True},
                                           "path": None}}  # fmt: skip

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        from toolkit.training import session

        def load_base(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                model = right(*args, **kwargs)
                head = model.get_output_embeddings()
                head.weight = nn.Parameter(head.weight.detach().clone())
                self.reached()
                return model

            return wrong

        patch(session, "load_base", load_base)
