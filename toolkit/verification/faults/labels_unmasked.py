"""padding or prompt tokens are supervised."""

from __future__ import annotations

from typing import Any

from toolkit.verification.faults.base import Fault, Patch


class LabelsUnmasked(Fault):
    id = "labels-unmasked"
    title = "padding or prompt tokens are supervised"
    stages = ("ledger", "forward")

    def inject(self, patch: Patch, case: Any) -> None:
        from dataclasses import replace

        from toolkit.data import loader
        from toolkit.data.formats import IGNORED

        def collate(right: Any) -> Any:
            def wrong(*args: Any, **kwargs: Any) -> Any:
                micro = right(*args, **kwargs)
                labels = micro.tensors["labels"]
                if not labels.eq(IGNORED).any():
                    return micro
                self.reached()
                shown = labels.masked_fill(labels == IGNORED, 0)
                return replace(micro, tensors=micro.tensors | {"labels": shown})

            return wrong

        patch(loader, "collate", collate)
