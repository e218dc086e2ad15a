"""ranks start from different weights."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import NOT_BROADCAST, Fault, Patch


class InitDiffers(Fault):
    id = "init-differs"
    title = "ranks start from different weights"
    stages = ("forward", "cross-rank")
    # DDP and DeepSpeed broadcast the first rank's weights; FSDP takes each rank's as they are.
    strategies = NOT_BROADCAST
    needs: ClassVar = {"adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        import os

        import torch

        from toolkit.training import session

        def load_base(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                model = right(*args, **kwargs)
                if os.environ["RANK"] != "0":
                    self.reached()
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(1.01)
                return model

            return wrong

        patch(session, "load_base", load_base)
