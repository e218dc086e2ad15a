"""one linear layer stays in bf16 under fp8."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.verification.faults.base import Fault, Patch


class Float8LayerLeft(Fault):
    id = "float8-layer-left"
    title = "one linear layer stays in bf16 under fp8"
    stages = ("engagement", "gradient")
    needs: ClassVar = {"precision": "bf16", "fp8": True, "adapter": None}

    def inject(self, patch: Patch, case: Any) -> None:
        from torch import nn

        from toolkit.training import session

        def convert(right: Any) -> Any:
            def wrong(model: Any, *arguments: Any) -> list[str]:
                names: list[str] = right(model, *arguments)
                left = model.get_submodule(names.pop())
                left.__class__ = nn.Linear
                self.reached()
                return names

            return wrong

        patch(session, "convert", convert)
