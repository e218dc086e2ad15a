"""frozen weights are missing after a resume."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch
from toolkit.verification.faults.helpers import LORA


class ResumeFrozenLost(Fault):
    id = "resume-frozen-lost"
    title = "frozen weights are missing after a resume"
    reference = "DeepSpeed#3090"
    stages = ("round-trip",)
    needs: ClassVar = {"adapter": LORA}

    def inject(self, patch: Patch, case: Any) -> None:
        import torch

        from toolkit.training import checkpoint

        def load(right: Any) -> Any:
            def wrong(session: Any, folder: Any) -> Any:
                progress = right(session, folder)
                with torch.no_grad():
                    for parameter in session.engine.model.parameters():
                        if not parameter.requires_grad:
                            self.reached()
                            getattr(parameter, "ds_tensor", parameter).data.zero_()
                return progress

            return wrong

        patch(checkpoint, "load", load)
